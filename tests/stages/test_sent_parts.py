"""Tensors that cross a cut in parts: the graph of a rank, and what a plan may not ask for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from autopipe import Plan, PlanError
from autopipe.ir.graph import BATCH, Dim, Ref, TensorSpec
from autopipe.planfile.parts import PartOf, Transfer
from autopipe.planfile.placements import I, R, S
from autopipe.sharding.collectives import CONVERT
from autopipe.stages.bind import Split, rank_trace, split_as_planned, split_for_evaluation
from autopipe.stages.sent_parts import part_dim
from tests.support.inprocess import close_together, traced
from tests.support.part_stories import in_parts, whole


@cache
def plan() -> Plan:
    return in_parts("gpt", 2, "1f1b")


def bound(plan: Plan) -> Split:
    return split_as_planned(traced("gpt")[0], plan)


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((BATCH, 12, 32), 2, 2),
        ((BATCH, 12, 33), 2, 1),
        ((BATCH, 12, 33), 8, None),
        ((8 * BATCH, 5), 8, None),
        ((), 2, None),
    ],
)
def test_the_last_dim_that_divides_whatever_the_rows(
    shape: tuple[Dim, ...], ranks: int, dim: int | None
) -> None:
    assert part_dim(TensorSpec(shape, torch.float32), ranks) == dim


def test_a_part_is_made_last_and_gathered_first() -> None:
    split = bound(plan())
    graph, (first, second) = split.graph, split.stages
    (sent,) = [sent for sent in plan().stages[0].sends if sent.part_of]
    assert sent.part_of == PartOf("blocks.1/add/1", 2)
    assert (sent.name, sent.shape) == ("blocks.1/add/1>part(2)", ("b", 12, 16))
    part, back = graph.nodes[first.stop - 1], graph.nodes[second.first]
    assert (part.name, part.op, part.args[2:4]) == (sent.name, CONVERT, (I, S(2)))
    assert (back.name, back.op, back.args[2:4]) == ("blocks.1/add/1>whole(1)", CONVERT, (S(2), I))
    assert split.plain is not None
    received, plainly = ({*dict(s.stages[1].receives)} for s in (split, split.plain))
    assert plainly - received == {Ref("blocks.1/add/1")}
    assert received - plainly == {Ref("blocks.1/add/1>part(2)")}


def test_a_partial_sum_of_a_gradient_stays_one() -> None:
    """Llama's norms get one where links are fast: its gradient goes back summed, in parts."""
    partial = in_parts("llama", 2, "1f1b", on=close_together)
    graph = split_as_planned(traced("llama")[0], partial).graph
    converted = [node.args[2:4] for node in graph.nodes if ">part(" in node.name]
    assert converted == [(R, S(2))]
    assert [node.args[2:4] for node in graph.nodes if ">whole(" in node.name] == [(S(2), R)]


def names(split: Split, first: int, stop: int) -> list[str]:
    """The nodes of a range, but for conversions to parts and back."""
    nodes = split.graph.nodes[first:stop]
    return [node.name for node in nodes if not node.name.startswith("blocks.1/add/1>")]


def test_blocks_and_stages_are_those_that_send_it_whole() -> None:
    parts, plain = bound(plan()), bound(whole(plan()))
    assert plain.plain is None and len(parts.graph.nodes) == len(plain.graph.nodes) + 2
    ranges = ((split.blocks, split.stages) for split in (parts, plain))
    for mine, theirs in zip(*ranges, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert names(parts, one.first, one.stop) == names(plain, other.first, other.stop)


def test_other_rows_go_in_parts_to_the_same_stages() -> None:
    training, found = bound(plan()), traced("gpt")[0]
    again = split_for_evaluation(rank_trace(found, plan(), 0), training)
    assert [stage.receives for stage in again.stages] == [s.receives for s in training.stages]


def asking(part: PartOf) -> Plan:
    """A plan of which the first tensor that is sent is to go as another part."""

    def changed(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(replace(t, part_of=part) if t.part_of else t for t in transfers)

    return replace(
        plan(),
        stages=tuple(
            replace(stage, sends=changed(stage.sends), receives=changed(stage.receives))
            for stage in plan().stages
        ),
    )


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (PartOf("blocks.0/add/0", 2), "stage 1 receives no such tensor"),
        (PartOf("blocks.1/add/1", 3), "it has 3 dims, and dim 3 is none of them"),
        (PartOf("blocks.1/add/1", 0), "its dim 0 of b does not divide into 2 equal parts"),
        (PartOf("blocks.2/flatten/0", 1), "it is not whole on each tensor-parallel rank"),
    ],
)
def test_what_cannot_go_in_parts_is_refused(part: PartOf, why: str) -> None:
    with pytest.raises(PlanError) as refused:
        bound(asking(part))
    said = str(refused.value)
    assert said.startswith("plan.stages[1].receives[") and why in said
    assert "--transfers whole" in said
