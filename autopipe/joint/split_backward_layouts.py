"""Split a stage's backward for a pipeline, with the tensor layouts that the dry run found.

The planner needs the bytes that the halves hold, the runtime the halves themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from autopipe.errors import PlanError
from autopipe.ir.blocks import Block
from autopipe.ir.graph import Graph, Ref, shape_at
from autopipe.ir.opaque_ops import OPAQUE
from autopipe.ir.partition import Stage
from autopipe.ir.stage_classes import kind_of
from autopipe.ir.torch_private import fake_mode
from autopipe.joint.joint_graph import CannotSplit, Layout
from autopipe.joint.split_backward import Held, Joint, held, split
from autopipe.joint.wanted import HALVES, Wanted
from autopipe.stages.dry_run import CrossingTensor, Known, Rehearsal, fake_state
from autopipe.stages.lower import Lowered, lower
from autopipe.stages.recompute import check_recompute, within

_T = TypeVar("_T")


def joint_for(
    graph: Graph,
    lowered: Lowered,
    rehearsal: Rehearsal,
    *,
    last: bool,
    precision: str = "fp32",
    device: torch.device | str = "cpu",
    wanted: Wanted = HALVES,
) -> Joint | None:
    """A lowered stage with its backward as graphs; None: impossible, and autograd runs it.

    Args:
        last: whether the stage returns the graph's results.
    """
    layouts = _layouts(graph, lowered.stage, rehearsal, lowered.rows, last, torch.device(device))
    return _if_it_can(split, graph, lowered, layouts, precision, wanted)


Layouts = tuple[tuple[Layout, ...], tuple[Layout | None, ...]]
"""The layouts of a stage's arguments, and of the gradients that its backward starts from."""


def _if_it_can(
    make: Callable[..., _T],
    graph: Graph,
    lowered: Lowered,
    layouts: Layouts,
    precision: str,
    wanted: Wanted,
) -> _T | None:
    if any(graph.nodes[position].op in OPAQUE for position in lowered.stage.nodes):
        return None  # only its real kernel knows what it reads or saves
    try:
        return make(lowered, *layouts, precision, wanted)
    except CannotSplit:
        return None


def _layouts(
    graph: Graph, stage: Stage, rehearsal: Rehearsal, rows: int, last: bool, place: torch.device
) -> Layouts:
    boundaries = rehearsal.boundaries

    def crossing(
        boundary: CrossingTensor, strides: Sequence[int], gradient: bool = False
    ) -> Layout:
        return Layout(boundary.shape, tuple(strides), boundary.dtype, place, gradient)

    arguments = [
        crossing(boundaries[ref], boundaries[ref].strides, stage.index in boundaries[ref].gradients)
        for ref in stage.incoming
    ]
    arguments += [
        Layout.dense(shape_at(graph.inputs[path], rows), graph.inputs[path].dtype, place)
        for path in stage.inputs
    ]
    # Of the gradients that come for one tensor the latest stage's is the first, and is added to.
    seeds = [
        crossing(boundary, boundary.gradients[max(boundary.gradients)])
        if boundary.gradients
        else None
        for boundary in (boundaries[ref] for ref in stage.outgoing)
    ]
    if last:
        seeds += seeds_of_loss(graph, place)
    return tuple(arguments), tuple(seeds)


def seeds_of_loss(graph: Graph, place: torch.device | str = "cpu") -> list[Layout | None]:
    """The layout of each result's gradient: the loss, a graph's first result, alone has one."""
    loss = graph.outputs[0]
    assert isinstance(loss, Ref), "a loss is made by a node"
    return [Layout.dense((), graph.spec(loss).dtype, place), *[None] * (len(graph.outputs) - 1)]


@dataclass(frozen=True)
class JointDryRun:
    """Measures the bytes that joint graphs of stages hold; equal stages are measured once.

    Args:
        rows: of a micro-batch.
        recompute, precision, known: as for `rehearse`.
        wanted: how backwards run that autograd does not.
    """

    graph: Graph
    blocks: Sequence[Block]
    rows: int
    recompute: Sequence[str] = ()
    precision: str = "fp32"
    wanted: Wanted = HALVES
    known: Known = field(default_factory=dict)

    def instead(self, stages: Sequence[Stage], rehearsal: Rehearsal) -> Rehearsal:
        """A dry run's result with the bytes that joint graphs hold in place of autograd's."""
        saved, made = list(rehearsal.saved), list(rehearsal.made)
        momentary = list(rehearsal.momentary)
        stash, fresh = [0] * len(stages), [0] * len(stages)
        compiled = [False] * len(stages)
        for stage in stages:
            joint = self._of(stage, rehearsal, last=stage.index == len(stages) - 1)
            if joint is not None:
                i = stage.index
                saved[i], stash[i], fresh[i] = joint.kept, joint.stash, joint.fresh
                # A joint graph keeps nothing that its backward does not read.
                momentary[i], made[i] = joint.moving, joint.made + joint.moving
                compiled[i] = self.wanted.least
        return replace(
            rehearsal,
            saved=tuple(saved),
            made=tuple(made),
            momentary=tuple(momentary),
            stash=tuple(stash),
            fresh=tuple(fresh),
            compiled=tuple(compiled),
        )

    def alone(self, stage: Stage) -> Rehearsal | None:
        """The dry run of a graph with one stage, from its joint graph; None: it has none.

        No run under autograd is needed, since no tensor comes from another stage in a layout that
        only that run would show.

        Raises:
            PlanError: a block to recompute cannot be recomputed with equal results.
        """
        again = within(self.graph, stage, self.blocks, self.recompute)
        check_recompute(self.graph, stage, self.blocks, again)
        joint = self._of(stage, Rehearsal({}, (), (), ()), last=True)
        if joint is None:
            return None
        return Rehearsal(
            {},
            (joint.kept,),
            (joint.made + joint.moving,),
            (joint.moving,),
            (joint.stash,),
            (joint.fresh,),
            (self.wanted.least,),
        )

    def _of(self, stage: Stage, rehearsal: Rehearsal, *, last: bool) -> Held | None:
        """The bytes that a stage's joint graph holds; None: it has none."""
        graph, blocks, rows, precision = self.graph, self.blocks, self.rows, self.precision
        again = within(graph, stage, blocks, self.recompute)
        kind = kind_of(graph, stage, blocks, again, last=last)
        layouts = _layouts(graph, stage, rehearsal, rows, last, torch.device("cpu"))
        offload = check_offload(graph, stage, blocks, self.wanted.offload)
        without_offload = replace(self.wanted, offload=frozenset())
        key = without_offload, offload, kind, layouts, rows, precision
        if key not in self.known:
            with fake_mode():
                states = {name: fake_state(graph, name) for name in stage.states}
                lowered = lower(
                    graph,
                    stage,
                    blocks,
                    states,
                    None,
                    rows,
                    last=last,
                    recompute=again,
                    precision=precision,
                )
            self.known[key] = _if_it_can(held, graph, lowered, layouts, precision, self.wanted)
        joint: Held | None = self.known[key]
        if offload and joint is None:
            raise cannot_offload(stage)
        return joint


def check_offload(
    graph: Graph, stage: Stage, blocks: Sequence[Block], offload: Collection[str]
) -> tuple[int, ...]:
    """Refuse blocks that cannot offload; returns the numbers of the stage's blocks that do.

    Args:
        offload: paths of blocks, of any stage.

    Raises:
        PlanError: such a block is called more than once; its calls cannot be told apart.
    """
    there = within(graph, stage, blocks, [block.path for block in blocks])
    calls = Counter(block.module for block in blocks)
    for block in blocks:
        if block.path in offload and calls[block.module] > 1:
            raise PlanError(
                f"offload: {block.path!r} was asked for, and {block.module!r} is called "
                f"{calls[block.module]} times in a forward",
                hint="leave it out: only blocks that are called once are offloaded",
            )
    return tuple(number for number, path in enumerate(there) if path in offload)


def check_offload_there(
    graph: Graph, stage: Stage, blocks: Sequence[Block], offload: Collection[str]
) -> None:
    """Refuse blocks of a plan's offload that the stage does not have.

    Raises:
        PlanError: names the first of them.
    """
    there = within(graph, stage, blocks, [block.path for block in blocks])
    if unknown := sorted({*offload}.difference(there)):
        raise PlanError(
            f"plan.stages[{stage.index}].offload: {unknown[0]!r} is no block of the stage",
            hint=f"its blocks are {', '.join(there)}" if there else "it has none",
        )


def cannot_offload(stage: Stage) -> PlanError:
    """The error for a stage whose blocks should offload although autograd has to run it."""
    return PlanError(
        f"stage {stage.index}: its blocks are to offload what they keep, and it has an op whose "
        "backward is no graph, so that autograd alone knows what it keeps",
        hint="plan with --offload off",
    )
