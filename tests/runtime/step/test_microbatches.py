"""Which rows of a batch are a rank's, and in which micro-batches: pictures of 16 rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopipe import ModelError, Plan
from autopipe.batch.tree import flatten
from autopipe.runtime.step.microbatches import Microbatches, divide
from autopipe.stages.bind import split_as_planned
from tests.support.inprocess import traced
from tests.support.pipes import ZOO, planned

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two replicas of GPT, four micro-batches on each."""
    return planned("gpt", 1, 2, 4)


def cut(plan: Plan, rows: int, replica: int, micro_batches: int | None, sharded: bool) -> str:
    """The rows of each micro-batch of a replica, told by the numbers that stand in them."""
    batch = ZOO["gpt"].inputs(rows)
    number = torch.arange(rows)
    leaves = {
        path: number.reshape(-1, *[1] * (leaf.dim() - 1)).expand(leaf.shape)
        for path, leaf in flatten(batch).items()
        if isinstance(leaf, torch.Tensor)
    }
    place = next(place for place in plan.mesh.places if place.dp == replica)
    parts: Microbatches = divide(plan, place, leaves, micro_batches, sharded=sharded)
    stage = split_as_planned(traced("gpt")[0], plan).stages[0]
    found = [parts.inputs(stage, k, CPU)[0].flatten(1)[:, 0] for k in range(parts.count)]
    return " ".join(f"{int(part[0])}-{int(part[-1])}" for part in found)


@pytest.mark.parametrize(
    ("rows", "replica", "micro_batches", "sharded", "expected"),
    [
        (16, 0, 4, False, "0-1 2-3 4-5 6-7"),
        (16, 1, 4, False, "8-9 10-11 12-13 14-15"),
        (16, 1, 4, True, "0-3 4-7 8-11 12-15"),  # the batch is the replica's own part
        (16, 1, None, False, "8-9 10-11 12-13 14-15"),  # as many as the plan has
        (12, 1, None, False, "6-7 8-9 10-11"),  # 6 rows of a replica divide by 3, not by 4
        (2, 1, None, False, "1-1"),
    ],
)
def test_rows(
    plan: Plan, rows: int, replica: int, micro_batches: int | None, sharded: bool, expected: str
) -> None:
    assert cut(plan, rows, replica, micro_batches, sharded) == expected


def test_a_micro_batch_may_be_written_while_others_are_in_flight(plan: Plan) -> None:
    """x.mul_(2) of the second writes the same batch: autograd refused the backward of the first."""
    rows, weight = torch.arange(8.0)[:, None], torch.ones(1, requires_grad=True)
    spec = replace(plan.inputs[0], shape=("b", 1), dtype="float32")
    alone = replace(plan, inputs=(spec,))
    stage = replace(split_as_planned(traced("gpt")[0], plan).stages[0], inputs=(spec.path,))
    parts = Microbatches(alone, {spec.path: rows}, 0, 2, 4)
    (first,), (second,) = (parts.inputs(stage, k, CPU) for k in (0, 1))
    loss = (weight * first).sum()
    second.mul_(2)
    loss.backward()
    assert weight.grad is not None and weight.grad.item() == 0 + 1
    assert rows.flatten().tolist() == [0, 1, 4, 6, 4, 5, 6, 7]  # as in eager, the batch is changed


def test_rows_that_do_not_divide(plan: Plan) -> None:
    with pytest.raises(ModelError) as refused:
        cut(plan, 12, 0, 4, False)
    assert refused.value.message == (
        "the batch has 12 rows, which do not divide into 4 micro-batches on each of 2 "
        "data-parallel ranks"
    )
    assert refused.value.hint == "give 8 rows, or another multiple of 8"
    alone = replace(plan, mesh=replace(plan.mesh, dp=1, places=plan.mesh.places[:1]))
    with pytest.raises(ModelError, match="has 6 rows, which do not divide into 4 micro-batches\n"):
        cut(alone, 6, 0, 4, False)
