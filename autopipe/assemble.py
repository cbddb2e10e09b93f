"""From stages and their rehearsal to the programs of a step and the bytes they hold.

The planner predicts with these functions and the runtime runs with them, so what is predicted is
what is run.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from autopipe import proof
from autopipe.footprint import Sizes
from autopipe.graph import Ref
from autopipe.partition import Stage
from autopipe.rehearsal import Boundary
from autopipe.schedule import SCHEDULES, Flow, Programs, forward_only
from autopipe.transfers import Edge, insert


def edges(stages: Sequence[Stage], boundaries: Mapping[Ref, Boundary]) -> tuple[Edge, ...]:
    """Which stage sends to which, and whether gradients come back."""
    found: dict[tuple[int, int], bool] = {}
    for stage in stages:
        for ref, target in stage.sends:
            back = target in boundaries[ref].gradients
            found[stage.index, target] = found.get((stage.index, target), False) or back
    return tuple(Edge(source, target, back) for (source, target), back in sorted(found.items()))


def step_programs(
    schedule: str,
    stages: Sequence[Stage],
    boundaries: Mapping[Ref, Boundary],
    micro_batches: int,
    windows: Sequence[int],
) -> Programs:
    """The programs of one training step, proved free of deadlock.

    Raises:
        ScheduleError: they are not; the sentence is the circle of waits.
    """
    compute = SCHEDULES[schedule](len(stages), micro_batches)
    programs = insert(compute, edges(stages, boundaries), windows)
    proof.check(programs)
    return programs


def evaluation_programs(
    stages: Sequence[Stage],
    boundaries: Mapping[Ref, Boundary],
    micro_batches: int,
    windows: Sequence[int],
) -> Programs:
    """The programs of one evaluation: forward alone, proved like a step's."""
    compute = forward_only(len(stages), micro_batches)
    programs = insert(compute, edges(stages, boundaries), windows)
    proof.check(programs)
    return programs


def sizes(stage: Stage, boundaries: Mapping[Ref, Boundary], kept: int) -> Sizes:
    """What one micro-batch weighs in a stage; `kept` as `Rehearsal.saved` has it."""
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
    return Sizes(kept, arriving, leaving)
