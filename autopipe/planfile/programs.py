"""Derive a plan's programs from the plan alone: each rank's instructions, with transfers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autopipe.errors import MEND_PLAN, PlanError, ScheduleError
from autopipe.planfile.contents import Plan
from autopipe.schedules import user_schedule
from autopipe.schedules.instructions import Programs, holders
from autopipe.schedules.lanes import sends_for
from autopipe.schedules.registry import make
from autopipe.schedules.transfers import Edge, edges_of, insert


def compute(plan: Plan) -> Programs:
    """A plan's step without transfers: a program for each rank of a pipeline.

    Raises:
        ScheduleError: there is no such schedule, or not for so many stages.
        PlanError: the lines of `plan.programs` are for another pipeline than the plan's.
    """
    with _at("plan.programs" if plan.programs else "plan.schedule"):
        return computed(plan)


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Within, errors of a schedule begin with its place in the plan."""
    try:
        yield
    except ScheduleError as error:
        hint = error.hint or MEND_PLAN
        raise ScheduleError(f"{place}: {error.message}", hint=hint) from error


def computed(plan: Plan) -> Programs:
    """`compute`, but errors do not name a place in the plan."""
    m = plan.batch.micro_batches
    if not plan.programs:
        depths = [boundary.depth for boundary in plan.boundaries]
        chunks = len(plan.stages) // plan.mesh.pp
        return make(
            plan.schedule,
            plan.mesh.pp,
            m,
            chunks=chunks,
            depths=depths if any(depths) else (),
            turns=plan.turns,
        )
    programs = user_schedule.parse("\n".join(plan.programs), plan.turns)
    written = len(programs), len(holders(programs)), micro_batches(programs)
    planned = plan.mesh.pp, len(plan.stages), m
    for noun, count, expected in zip(
        ("ranks", "stages", "micro-batches"), written, planned, strict=True
    ):
        if count != expected:
            raise PlanError(f"plan.programs: they are for {count} {noun}, the plan has {expected}")
    return programs


def micro_batches(programs: Programs) -> int:
    """The number of micro-batches in the programs."""
    return 1 + max(instruction.microbatch for program in programs for instruction in program)


def edges(plan: Plan) -> tuple[Edge, ...]:
    """Which stage sends to which, and whether gradients come back."""
    return edges_of(
        Edge(index, sent.peer, sent.gradient)
        for index, stage in enumerate(plan.stages)
        for sent in stage.sends
    )


def step(plan: Plan, alone: Programs | None = None) -> Programs:
    """A plan's step with its transfers: what its ranks run.

    Args:
        alone: the result of `compute`, if the caller has it.

    Raises:
        ScheduleError, PlanError: as `compute`.
    """
    windows = [boundary.window for boundary in plan.boundaries]
    return insert(alone or compute(plan), edges(plan), windows, sends_ahead(plan), plan.turns)


def sends_ahead(plan: Plan) -> int:
    """The number of sends of a channel that may be under way at once in a plan's step."""
    return sends_for([boundary.depth for boundary in plan.boundaries])
