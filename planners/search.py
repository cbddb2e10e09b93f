"""Where a planner may look: the meshes, micro-batches and schedules that the constraints leave.

    frame = (pp, dp, micro_batches)        what is left to a planner: a schedule, and pp - 1 cuts

A mesh uses every device, pp * dp = devices, unless the user fixes both degrees. Micro-batches are
equal and of a size that has a profile. Constraints that leave nothing are refused here, at the
door, in terms of what was asked; that nothing *fits* is found later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopipe.errors import InfeasibleError
from autopipe.estimate import chunks_of, in_flights, profile_of
from autopipe.problem import WRITTEN, Problem
from autopipe.schedules import SCHEDULES

CONSIDERED = ("1f1b", "gpipe")
"""The schedules to choose from where none is asked for, the preferred one first."""


class Frame(NamedTuple):
    """A candidate before its schedule and its cuts."""

    pp: int
    dp: int
    micro_batches: int

    def __str__(self) -> str:
        return f"pp={self.pp} dp={self.dp} micro_batches={self.micro_batches}"


def frames(problem: Problem) -> tuple[Frame, ...]:
    """All frames to consider: fewest stages first, then fewest micro-batches.

    Raises:
        InfeasibleError: the constraints contradict the devices, the units or the batch.
    """
    meshes = _meshes(problem)
    asked = problem.constraints.micro_batches
    found = tuple(
        Frame(pp, dp, m)
        for pp, dp in meshes
        for m in _micro_batches(problem, dp)
        if asked in (None, m)
    )
    if not found:
        raise _indivisible(problem, sorted({dp for _, dp in meshes}))
    return found


def schedules(problem: Problem) -> tuple[str, ...]:
    """Names of the schedules to consider, the preferred one first.

    Raises:
        InfeasibleError: the constraint names a schedule that does not exist.
    """
    asked = problem.constraints.schedule
    if asked is None:
        return CONSIDERED
    if asked not in (*SCHEDULES, WRITTEN):
        raise InfeasibleError(
            f"schedule={asked!r} was asked for, and there is none of that name",
            hint=f"schedule is {one_of(list(SCHEDULES))}, or a file with one",
        )
    return (asked,)


def undominated(problem: Problem, frame: Frame) -> tuple[str, ...]:
    """The schedules without those that hold, in every stage, no less than an earlier one.

    By the estimate those that are considered together take the same seconds, and differ in memory
    alone: what fits under the later name fits under the earlier one and is as fast.
    """
    kept: dict[str, tuple[int, ...]] = {}
    for name in schedules(problem):
        held = in_flights(problem, name, frame.pp, frame.micro_batches)
        if not any(all(map(int.__le__, other, held)) for other in kept.values()):
            kept[name] = held
    return tuple(kept)


def one_of(choices: Sequence[object]) -> str:
    """`1`, `1 or 2`, `1, 2 or 4`."""
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last


def _meshes(problem: Problem) -> list[tuple[int, int]]:
    """All (pp, dp), fewest stages first."""
    asked, devices, units = problem.constraints, problem.devices, problem.units
    for name in ("pp", "dp", "tp", "micro_batches"):
        degree = getattr(asked, name)
        if degree is not None and degree < 1:
            raise InfeasibleError(f"{name}={degree} was asked for, and the least is 1")
    if asked.pp is not None and asked.dp is not None:
        meshes = [(asked.pp, asked.dp)]
        if asked.pp * asked.dp > devices:
            tp = problem.tp
            of_tp = f" tp={tp}" if tp > 1 else ""
            raise InfeasibleError(
                f"pp={asked.pp} dp={asked.dp}{of_tp} needs {asked.pp * asked.dp * tp} devices, "
                f"found {devices * tp}",
                hint="leave out pp or dp, and the other one follows",
            )
    else:
        whole = [(pp, devices // pp) for pp in range(1, devices + 1) if devices % pp == 0]
        meshes = [mesh for mesh in whole if asked.pp in (None, mesh[0])]
        meshes = [mesh for mesh in meshes if asked.dp in (None, mesh[1])]
        if not meshes:
            axis, name = (0, "pp") if asked.pp is not None else (1, "dp")
            degrees = sorted(mesh[axis] for mesh in whole if mesh[0] <= units)
            raise InfeasibleError(
                f"{name}={getattr(asked, name)} was asked for and does not divide the "
                f"{devices} devices",
                hint=f"{name} of {one_of(degrees)}; or fix both pp and dp, and the rest stay idle",
            )
    chunks = max(chunks_of(asked, name) for name in schedules(problem))
    possible = [mesh for mesh in meshes if mesh[0] * chunks <= units]
    if not possible:
        pp, dp = meshes[0]
        raise InfeasibleError(
            f"pp={pp} dp={dp} needs a model of at least {pp * chunks} units, one a stage; "
            f"this one has {units} to cut between",
            hint=f"pp of at most {units // chunks}",
        )
    return possible


def _micro_batches(problem: Problem, dp: int) -> list[int]:
    """Each number of micro-batches that has a profile, fewest first."""
    counts = (problem.batch // (dp * profile.rows) for profile in problem.profiles)
    return sorted({m for m in counts if m > 0 and profile_of(problem, dp, m) is not None})


def _indivisible(problem: Problem, degrees: list[int]) -> InfeasibleError:
    sizes = one_of([profile.rows for profile in problem.profiles])
    asked = problem.constraints.micro_batches
    counts = sorted({m for dp in degrees for m in _micro_batches(problem, dp)})
    whole = f"a batch of {problem.batch} rows over dp={one_of(degrees)}"
    if asked is not None and counts:
        below = [m for m in counts if m < asked][-1:]
        above = [m for m in counts if m > asked][:1]
        return InfeasibleError(
            f"micro_batches={asked} was asked for, and {whole} does not divide into {asked} "
            f"micro-batches of {sizes} rows",
            hint=f"the nearest that does is micro_batches={one_of(below + above)}",
        )
    least = degrees[0] * min(profile.rows for profile in problem.profiles)
    below_rows = problem.batch // least * least
    batches = [rows for rows in (below_rows, below_rows + least) if rows > 0]
    return InfeasibleError(
        f"{whole} does not divide into micro-batches of {sizes} rows",
        hint=f"a batch of {one_of(batches)} rows divides, or give pp and dp other degrees",
    )
