"""Find a plan's cuts in a traced model, or refuse the plan.

    plan.stages[1].first = "h.4/layer_norm/0"  ->  position 61 of the graph  ->  Stage

Evaluation has its own graph; it is cut so that every stage needs only the parameters that it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from types import MappingProxyType
from typing import NamedTuple

import torch

from autopipe.errors import PlanError
from autopipe.frontend.loss import Loss
from autopipe.ir import fingerprint
from autopipe.ir.blocks import Block, find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import Graph, Ref
from autopipe.ir.partition import Stage, check_turns, in_turns, partition
from autopipe.planfile import programs
from autopipe.planfile.consistency import ZERO
from autopipe.planfile.contents import BATCH, ROWS, Plan
from autopipe.planfile.placements import Sharding
from autopipe.rewriting.fused_attention import fused
from autopipe.rewriting.label_counts import LabelCounts, label_counts
from autopipe.rewriting.loss_in_parts import in_parts
from autopipe.rows.row_dims import outputs_lie
from autopipe.schedules.instructions import Programs, splits
from autopipe.sharding.local_graph import blocks_of, held_whole, shard_graph, shardable
from autopipe.sharding.plan_io import fitted, read_back
from autopipe.stages import sent_parts
from autopipe.stages.loss_cut import cut_loss
from autopipe.stages.precision import PRECISIONS
from autopipe.stages.whole_loss import WholeLoss
from autopipe.tracing.traced import Trace
from autopipe.util.seeding import of_draws, of_hashes


@dataclass(frozen=True)
class Split:
    """A traced model cut into stages.

    `once` has each stage once; `stages` has it once for each rank that takes turns at it, by
    `turns` (empty: one each). `whole` is the loss of the whole batch, if the plan's loss is over
    it: then the graph is that of `WholeLoss.rows`. `labels`: the labels over which the loss is a
    mean. `plain` is the split with all tensors sent whole, if some go in parts: those to the stages
    of `in_parts` (numbers of `once`) do.
    """

    trace: Trace
    once: tuple[Stage, ...]
    blocks: tuple[Block, ...]
    whole: WholeLoss | None = None
    labels: LabelCounts | None = None
    in_parts: sent_parts.InParts = field(default_factory=dict)
    plain: Split | None = None
    turns: tuple[int, ...] = ()

    @property
    def graph(self) -> Graph:
        """The traced model."""
        return self.trace.graph

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the plan's list."""
        return in_turns(self.once, self.turns)


def split_as_planned(
    traced: Trace, plan: Plan, tp: int = 0, sharding: Sharding | None = None
) -> Split:
    """Shard a traced model and cut it into stages, as the plan decides.

    Args:
        tp: the tensor-parallel coordinate of the rank, from 0.
        sharding: `read_back` of the plan, if already made.

    Raises:
        PlanError: the plan belongs to another model, or a cut or a placement is not legal.
    """
    graph = traced.graph
    if fingerprint.fingerprint(graph) != plan.fingerprint:
        by = "; ".join(other_versions(plan))
        first = fingerprint.first_difference(graph, plan.trail)
        raise PlanError(
            "plan.fingerprint: the plan was made for another model or another loss"
            f"{by and f', or with other versions ({by})'}. First difference: {first}",
            hint=f"plan again with `autopipe plan`{of_draws(first)}{of_hashes()}",
        )
    return cut_as_planned(traced, plan, tp, sharding)


def cut_as_planned(
    traced: Trace,
    plan: Plan,
    tp: int = 0,
    sharding: Sharding | None = None,
    *,
    length: int | None = None,
) -> Split:
    """`split_as_planned` for a model that is known to be the plan's.

    Args:
        length: the plan's tokens of a row, if the sequence is a symbol.
    """
    local = rank_trace(traced, plan, tp, sharding, length=length)
    graph = local.trace.graph
    if plan.turns:
        check_turns(graph)
    stages = partition(analyse(graph), _cuts(plan, graph))
    split = local.split(stages, plan.turns)
    if to := sent_parts.in_parts_of(plan):
        dims = sent_parts.planned_dims(plan, graph, stages, local.held_whole)
        split = _parted(split, to, dims, local)
    for index, (stage, planned) in enumerate(zip(split.stages, plan.stages, strict=True)):
        parameters = [n for n in stage.states if graph.states[n].kind == "parameter"]
        for key, expected, found in (
            ("parameters", parameters, list(planned.parameters)),
            ("receives", _peers(stage.receives), [(t.name, t.peer) for t in planned.receives]),
            ("sends", _peers(stage.sends), [(t.name, t.peer) for t in planned.sends]),
        ):
            differing = set(map(str, expected)) ^ set(map(str, found))
            if differing:
                raise PlanError(
                    f"plan.stages[{index}].{key}: the stage from {planned.first!r} to "
                    f"{planned.last!r} has {len(expected)} of them, the plan {len(found)}; they "
                    f"differ in {min(differing)}"
                )
    return split


def _cuts(plan: Plan, graph: Graph) -> list[int]:
    """The positions before which a plan cuts its graph.

    Raises:
        PlanError: it names a node that is not there, or its stages do not hold every node once.
    """
    bounds, index = [0], 0
    for stage in plan.once:
        for word, name in (("first", stage.first), ("last", stage.last)):
            if name not in graph.index:
                raise PlanError(f"plan.stages[{index}].{word}: the model has no node {name!r}")
        if graph.index[stage.first] != bounds[-1]:
            rest = graph.nodes[bounds[-1] :]
            expected = repr(rest[0].name) if rest else "nothing after the last node"
            raise PlanError(
                f"plan.stages[{index}].first: stage {index} begins with {stage.first!r}, "
                f"expected {expected}: the stages must hold every node once, in order"
            )
        bounds.append(graph.index[stage.last] + 1)
        index += stage.turns
    if bounds[-1] != len(graph.nodes):
        raise PlanError(
            f"plan.stages[{len(plan.stages) - 1}].last: the last stage ends with "
            f"{plan.stages[-1].last!r}, the model with {graph.nodes[-1].name!r}"
        )
    return bounds[1:-1]


def _parted(plain: Split, to: sent_parts.InParts, dims: sent_parts.Dims, local: RankTrace) -> Split:
    """A split whose tensors go in parts, from one whose tensors go whole."""
    graph, cuts, *_ = sent_parts.with_parts(
        plain.graph, plain.once, dims, local.held_whole, local.ranks
    )
    traced, once = replace(plain.trace, graph=graph), partition(analyse(graph), cuts)
    blocks = blocks_of(graph, plain.blocks)
    return replace(plain, trace=traced, once=once, blocks=blocks, in_parts=to, plain=plain)


def _peers(transfers: Iterable[tuple[Ref, int]]) -> list[tuple[str, int]]:
    return [(str(ref), peer) for ref, peer in transfers]


def check_runs(plan: Plan, compute: Programs | None = None) -> None:
    """Refuse a plan with fields, or a combination of fields, that this version cannot run.

    Args:
        compute: the plan's programs without transfers, if already made.

    Raises:
        PlanError: names the field.
        ScheduleError: the schedule is unknown or invalid.
    """
    refused = {
        "precision": (plan.precision, PRECISIONS),
        **{f"stages[{i}].zero": (s.zero, ZERO) for i, s in enumerate(plan.stages)},
        **{
            f"blocks[{i}].states": (block.states, ((),))
            for i, block in enumerate(plan.blocks)
            if plan.mesh.tp == 1
        },
    }
    for path, (value, runs) in refused.items():
        if value not in runs:
            raise PlanError(
                f"plan.{path}: {value!r} was asked for; this version runs "
                f"{' or '.join(map(repr, runs))} only"
            )
    for index, stage in enumerate(plan.stages):
        if stage.zero != plan.zero:
            raise PlanError(
                f"plan.stages[{index}].zero: {stage.zero}, but {plan.zero} in stage 0; all stages "
                "of a pipeline are held alike"
            )
    halves = splits(compute or programs.compute(plan))  # refuses an unknown schedule
    if plan.zero == 3 and halves:
        message = f"{plan.schedule} and zero=3 do not go together: it gathers for both at once"
        raise PlanError(message, hint="plan with 1f1b, or with zero=1")
    away = next((index for index, stage in enumerate(plan.stages) if stage.offload), None)
    if away is not None and halves:
        raise PlanError(
            f"plan.stages[{away}].offload: {plan.stages[away].offload[0]!r} is to offload what it "
            f"keeps, and {plan.schedule} has backward in two halves, which would both fetch it",
            hint="plan with 1f1b, or with --offload off",
        )


def other_versions(plan: Plan) -> list[str]:
    """The packages whose version differs from the plan's, one phrase each."""
    found = []
    for name, planned in plan.versions.items():
        try:
            here = str(torch.__version__) if name == "torch" else metadata.version(name)
        except metadata.PackageNotFoundError:
            here = "none"
        if here != planned:
            found.append(f"planned with {name} {planned}, here {here}")
    return found


def check_loss(plan: Plan, loss: Loss | None) -> None:
    """Refuse a loss function if the plan was made without one, and the reverse.

    Raises:
        PlanError: the plan and the call differ in having a loss function.
    """
    if plan.loss and loss is None:
        raise PlanError(
            "plan.loss: the plan was made with a loss function, and none is given",
            hint="parallelize(model, plan, loss=loss); in a model file, def loss(outputs, batch)",
        )
    if plan.loss is False and loss is not None:
        raise PlanError(
            "plan.loss: the plan was made without a loss function, and one is given",
            hint="leave it out, as the model's own output is the loss; or plan again, with it",
        )


class RankTrace(NamedTuple):
    """The graph that one of `ranks` tensor-parallel coordinates runs.

    Attributes:
        whole, labels: as `Split` has them.
        held_whole: if the plan sends tensors in parts, those that may go so.
    """

    trace: Trace
    blocks: tuple[Block, ...]
    whole: WholeLoss | None = None
    labels: LabelCounts | None = None
    held_whole: sent_parts.HeldWhole = MappingProxyType({})
    ranks: int = 1

    def split(self, stages: tuple[Stage, ...], turns: tuple[int, ...]) -> Split:
        """The trace, cut into stages."""
        return Split(self.trace, stages, self.blocks, self.whole, self.labels, turns=turns)


def rank_trace(
    traced: Trace,
    plan: Plan,
    tp: int,
    sharding: Sharding | None = None,
    *,
    length: int | None = None,
    other: bool = False,
) -> RankTrace:
    """The graph that tensor-parallel coordinate `tp` runs.

    Args:
        length: as `cut_as_planned` has it.
        other: whether the graph is not the plan's, but in evaluation or of shorter rows.

    Raises:
        ModelError: the plan's loss is over the whole batch, and this graph's cannot be.
    """
    others = len(traced.outputs)
    whole = cut_loss(traced.graph, others) if plan.loss_over == BATCH else None
    labels = label_counts(traced.graph, others) if plan.loss_over == ROWS else None
    graph = traced.graph if whole is None else whole.rows
    graph = in_parts(fused(graph) if plan.fused_attention else graph, plan.loss_parts)
    lie, blocks = outputs_lie(traced.graph, others), find_blocks(graph)
    traced = replace(traced, graph=graph, lie=lie)
    if plan.mesh.tp == 1:
        return RankTrace(traced, blocks, whole, labels)
    flow = shardable(graph)
    sharding = fitted(sharding or read_back(plan), plan, flow, length, other=other)
    shard = shard_graph(flow, sharding, tp, length=length)
    held = held_whole(flow, shard, sharding, length=length) if sent_parts.in_parts_of(plan) else {}
    blocks, traced = blocks_of(shard, blocks), replace(traced, graph=shard)
    return RankTrace(traced, blocks, whole, labels, held, plan.mesh.tp)


def split_for_evaluation(local: RankTrace, training: Split, when: str = "in evaluation") -> Split:
    """Cut the evaluation graph so that every stage needs only the parameters that it has.

    So is cut the graph of training with rows of another length.
    A node is in the stage of the training node with its name, or in that of the node before it.

    Args:
        when: the graph is run, for a refusal.

    Raises:
        PlanError: a stage would have no nodes, or would need parameters of another stage.
    """
    graph = local.trace.graph
    flow, stages = analyse(graph), training.once
    owner = {p: stage.index for stage in stages for p in range(stage.first, stage.stop)}
    planned = {node.name: owner[position] for position, node in enumerate(training.graph.nodes)}
    cuts: list[int] = []
    current = 0
    for position, node in enumerate(graph.nodes):
        index = planned.get(node.name, current)
        if flow.local[position] or index <= current:
            continue
        cuts += [position] * (index - current)
        current = index
    if len(set(cuts)) != len(stages) - 1:
        why = f"{when} the model computes nothing in some stages, so that it cannot be run with"
        raise PlanError(f"{why} this plan", hint="cut the model elsewhere")
    split = local.split(partition(flow, cuts), training.turns)
    if to := training.in_parts:
        dims = sent_parts.all_dims(graph, split.once, local.held_whole, local.ranks, to)
        split = _parted(split, to, dims, local)
    for stage, trained in zip(split.once, stages, strict=True):
        needed = (name for name in stage.states if graph.states[name].kind != "constant")
        if missing := [name for name in needed if name not in trained.states]:
            raise PlanError(
                f"{when} stage {stage.index} needs {missing[0]!r}, which it does not hold "
                "in training",
                hint="cut the model elsewhere",
            )
    return split
