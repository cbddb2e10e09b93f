"""Make the programs of a step, and the bytes they hold, from stages and their dry run.

The planner and the runtime both use these functions, so the predicted programs are the ones that
run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from autopipe.ir.graph import Ref
from autopipe.ir.partition import Stage
from autopipe.schedules import deadlock
from autopipe.schedules.instructions import Flow, Instruction, Programs, holders
from autopipe.schedules.lanes import SENDS_UNDER_WAY
from autopipe.schedules.peak_memory import Sizes, fullest_moment
from autopipe.schedules.transfers import Edge, edges_of, insert
from autopipe.stages.dry_run import CrossingTensor, Rehearsal


def edges(stages: Sequence[Stage], boundaries: Mapping[Ref, CrossingTensor]) -> tuple[Edge, ...]:
    """Which stage sends to which, and whether gradients come back."""
    return edges_of(
        Edge(stage.index, target, target in boundaries[ref].gradients)
        for stage in stages
        for ref, target in stage.sends
    )


def step_programs(
    compute: Programs,
    stages: Sequence[Stage],
    boundaries: Mapping[Ref, CrossingTensor],
    windows: Sequence[int],
    sends_ahead: int = SENDS_UNDER_WAY,
    turns: Sequence[int] = (),
) -> Programs:
    """Make the programs of one training step or evaluation, proved free of deadlock.

    Args:
        turns: as `schedules.transfers.insert` has it.

    Raises:
        ScheduleError: the programs deadlock; the message is the cycle of waits.
    """
    programs = insert(compute, edges(stages, boundaries), windows, sends_ahead, turns)
    # Of ranks that take turns one may have nothing to do in a batch of few micro-batches.
    deadlock.check(programs, placed=range(len(stages)) if turns else None)
    return programs


def sizes(rehearsal: Rehearsal, stage: Stage) -> Sizes:
    """The bytes of one micro-batch in a stage."""
    boundaries = rehearsal.boundaries
    arriving: dict[tuple[Flow, int], dict[Hashable, int]] = {}
    leaving: dict[tuple[Flow, int], dict[Hashable, int]] = {}
    for ref, source in stage.receives:
        boundary = boundaries[ref]
        arriving.setdefault((Flow.ACTIVATION, source), {})[ref] = boundary.bytes
        if stage.index in boundary.gradients:
            leaving.setdefault((Flow.GRADIENT, source), {})[ref] = boundary.bytes
    for ref, target in stage.sends:
        boundary = boundaries[ref]
        leaving.setdefault((Flow.ACTIVATION, target), {})[ref] = boundary.bytes
        if target in boundary.gradients:
            arriving.setdefault((Flow.GRADIENT, target), {})[ref] = boundary.bytes
    i = stage.index
    stash, fresh = (rehearsal.stash[i], rehearsal.fresh[i]) if rehearsal.stash else (0, 0)
    made, momentary = rehearsal.made[i], rehearsal.momentary[i]
    return Sizes(rehearsal.saved[i], arriving, leaving, stash, fresh, made, momentary)


StageMoment = tuple[Counter[str], Instruction | None]
"""Bytes of a stage's "activations" and "transfers", and the instruction at which its rank has so
many."""


def fullest_moments(
    programs: Programs, stages: Sequence[Stage], rehearsal: Rehearsal
) -> tuple[StageMoment, ...]:
    """For each stage, what it holds at the peak of its rank, and when that is."""
    moments: dict[int, StageMoment] = {}
    placed = holders(programs)
    for rank, program in enumerate(programs):
        on_rank = [stage for stage, holder in zip(stages, placed, strict=True) if holder == rank]
        at, held = fullest_moment(
            program, {stage.index: sizes(rehearsal, stage) for stage in on_rank}
        )
        moments |= {stage.index: (Counter(), at) for stage in on_rank}
        for (stage, kind), size in held.items():
            moments[stage][0][kind] += size
    return tuple(moments[stage.index] for stage in stages)
