"""Lists the configs that the constraints leave: meshes, micro-batches, ZeRO stages, schedules.

    config = (pp, dp, micro_batches, zero, schedule, depth, chunks, turns)
    left to a planner: the cuts, what is recomputed, whose devices

On up to SMALL devices every mesh is tried, even if it leaves devices idle; on more devices only
meshes that leave the fewest idle. Micro-batches are equal and have a size with a profile.
Constraints that leave no config are refused here, in the words of the constraints; whether a plan
*fits* is found later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopipe.errors import InfeasibleError
from autopipe.planfile.turns import TAKES_TURNS
from autopipe.planners.model.places import chunks_of, profile_of
from autopipe.planners.model.problem import EAGER, FEWEST_CHUNKS, WRITTEN, Config, Problem, splits
from autopipe.planners.model.step_formula import floor_seconds
from autopipe.schedules.registry import SCHEDULES, named

CONSIDERED = ("1f1b", EAGER, "interleaved", "zb-h1", "zb-v")
"""The schedules to choose from where none is asked for, the preferred one first. `gpipe` takes the
seconds of `1f1b` and holds no less, and `naive` is for comparison."""

SMALL = 64
"""Devices up to which every mesh is looked at."""

CHUNKS = (FEWEST_CHUNKS, 4, 8)
"""Stages on each rank that are looked at under the schedule interleaved. With v of them the bubble
is 1/v of 1F1B's, and micro-batches cross v times as often (Narayanan et al., SC 2021, 2.2.2)."""

MOST_CHUNKS = 12
"""Up to so many are looked at where they leave each stage equally many blocks, or would if the
embedding and the head were one block each."""

DEPTHS = (1, 2, 4, 8, 16)
"""Micro-batches in flight besides, at each boundary, that are looked at for eager-1f1b."""


def configs(problem: Problem) -> tuple[Config, ...]:
    """All configs to consider, in tie order.

    Fewest stages, then most replicas, fewest micro-batches, the least ZeRO, the first schedule.

    Raises:
        InfeasibleError: the constraints contradict the devices, the units or the batch.
    """
    _check_halves(problem)
    _check_turns(problem)
    meshes = _meshes(problem)
    found = tuple(
        config
        for pp, dp in meshes
        for m in micro_batches(problem, dp)
        for config in _variants(problem, pp, dp, m)
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
    if asked is None and problem.constraints.turns:
        return (TAKES_TURNS,)
    if asked is None:
        return CONSIDERED
    if asked not in (*SCHEDULES, WRITTEN):
        raise InfeasibleError(
            f"schedule={asked!r} was asked for, and there is none of that name",
            hint=f"schedule is {one_of(list(SCHEDULES))}, or a file with one",
        )
    return (asked,)


def one_of(choices: Sequence[object]) -> str:
    """`1`, `1 or 2`, `1, 2 or 4`."""
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last


def _variants(problem: Problem, pp: int, dp: int, m: int) -> Iterator[Config]:
    """The ways to run a mesh and its micro-batches."""
    asked = problem.constraints
    shared = dp * max(asked.turns or (1,)) > 1
    zeros = [zero for zero in problem.zeros if shared or zero == problem.zeros[0]]
    if asked.turns:
        zeros = [zero for zero in zeros if zero <= 1]
    for zero in zeros:
        for name in schedules(problem):
            if splits(problem, name) and (zero == 3 or asked.offload):
                continue
            if asked.schedule is None and pp == 1 and name != CONSIDERED[0]:
                continue  # without a pipeline others only let some gradient sums begin earlier
            for chunks in _chunks(problem, name, pp):
                for depth in _depths(problem, name, pp, dp, m):
                    yield Config(pp, dp, m, zero, name, depth, chunks, asked.turns or ())


def _chunks(problem: Problem, name: str, pp: int) -> Iterator[int]:
    """The numbers of stages on each rank to try; each stage needs a unit."""
    seen: set[int] = set()
    blocks = len(problem.repeated)
    even = (
        chunks
        for chunks in range(FEWEST_CHUNKS, MOST_CHUNKS + 1)
        if blocks and any(layers % (pp * chunks) == 0 for layers in (blocks, blocks + 2))
    )
    for chunks in sorted({*CHUNKS, *even}):
        found = chunks_of(problem.constraints, name, chunks)
        # A schedule with a number of its own, or that was asked for, has it whatever we say.
        stages = len(problem.constraints.turns or ()) or pp * found
        if stages <= problem.units and found not in seen:
            seen.add(found)
            yield chunks


def _depths(problem: Problem, name: str, pp: int, dp: int, m: int) -> Iterator[int]:
    """The depths to try for a schedule; for eager-1f1b as long as more of them hide something."""
    asked = problem.constraints
    if asked.schedule == WRITTEN or not named(name).depths:
        yield 0
    elif asked.depth is not None:
        yield asked.depth
    else:
        profile = profile_of(problem, dp, m)
        assert profile is not None, "a config has a profile"
        if asked.schedule == EAGER:
            yield 0  # it is 1f1b then, which memory may ask for
        computing = sum(profile.forward[0]) + sum(profile.backward[0])
        for depth in DEPTHS:
            if depth < m or depth == 1:
                yield depth
            if floor_seconds(problem, Config(pp, dp, m, 0, name, depth)) <= computing / pp:
                return


def _meshes(problem: Problem) -> list[tuple[int, int]]:
    """All (pp, dp), fewest stages first, then most replicas."""
    asked, devices, units = problem.constraints, problem.machine.devices, problem.units
    _check_devices(problem)
    chunks = min(chunks_of(asked, name) for name in schedules(problem))
    ranks = sum(asked.turns) if asked.turns else asked.pp
    pps = [ranks] if ranks is not None else range(1, min(devices, units // chunks) + 1)
    meshes = [
        (pp, dp)
        for pp in pps
        for dp in ([asked.dp] if asked.dp is not None else range(devices // pp, 0, -1))
        if pp * dp <= devices
    ]
    if devices > SMALL:
        degrees = {dp for _, dp in meshes}
        usable = {dp for dp in degrees if micro_batches(problem, dp)}
        usable = usable or {dp for dp in degrees if _profiled(problem, dp)}
        dividing = [mesh for mesh in meshes if mesh[1] in usable]
        most = max((pp * dp for pp, dp in dividing), default=0)
        meshes = [(pp, dp) for pp, dp in dividing if pp * dp == most] or meshes
    stages = len(asked.turns or ())
    possible = [mesh for mesh in meshes if (stages or mesh[0] * chunks) <= units]
    if not possible:
        raise _too_few_units(problem, *(meshes or [(asked.pp or 1, asked.dp or 1)])[0], chunks)
    return possible


class TooFewUnits(InfeasibleError):
    """Raised where a mesh has more stages than a model has units to cut between."""


def _too_few_units(problem: Problem, pp: int, dp: int, chunks: int) -> TooFewUnits:
    """Why a mesh has more stages than a model has units.

    Args:
        chunks: stages on each rank. Where there are several, the schedule is part of the reason.
    """
    hints = [f"pp of at most {most}"] if (most := problem.units // chunks) else []
    several = ""
    if chunks > 1:
        several = f" by {one_of(schedules(problem))}, with {chunks} stages on each rank,"
        hints.append("a schedule of one stage on each rank, as 1f1b")
    return TooFewUnits(
        f"pp={pp} dp={dp}{several} needs a model of at least {pp * chunks} units, one a stage; "
        f"this one has {problem.units} to cut between",
        hint="; or ".join(hints),
    )


def _check_halves(problem: Problem) -> None:
    names = schedules(problem)
    if problem.constraints.offload and all(splits(problem, name) for name in names):
        raise InfeasibleError(
            f"{one_of(names)} and blocks that offload what they keep do not go together: both "
            "halves of a backward would fetch it",
            hint="the schedule 1f1b, or --offload off",
        )
    if problem.zeros == (3,) and all(splits(problem, name) for name in names):
        raise InfeasibleError(
            f"{one_of(names)} and zero=3 do not go together: it gathers for both halves of a "
            "backward at once",
            hint="the schedule 1f1b, or zero=1",
        )


def _check_turns(problem: Problem) -> None:
    asked, machine = problem.constraints, problem.machine
    if not asked.turns:
        return
    turns = f"turns={','.join(map(str, asked.turns))} was asked for"
    if min(asked.turns) < 1:
        raise InfeasibleError(f"{turns}, and each stage has a rank at least")
    if asked.pp not in (None, sum(asked.turns)):
        raise InfeasibleError(
            f"{turns}, which are {sum(asked.turns)} ranks of a pipeline, and pp={asked.pp}",
            hint="leave out pp, or give turns that make as many ranks",
        )
    if asked.schedule not in (None, TAKES_TURNS):
        raise InfeasibleError(
            f"{turns}, and the schedule {asked.schedule}", hint=f"the schedule {TAKES_TURNS}"
        )
    if not machine.alike:
        raise InfeasibleError(
            f"{turns}, and devices differ: ranks that take turns are to be alike",
            hint="leave out turns, or plan for devices of one kind and memory",
        )
    if min(problem.zeros) > 1:
        raise InfeasibleError(f"{turns}, and zero={problem.zeros[0]}", hint="zero 0 or 1")
    if asked.micro_batches is not None and asked.micro_batches < max(asked.turns):
        raise InfeasibleError(
            f"{turns}, and micro_batches={asked.micro_batches}: each rank that takes turns at a "
            "stage needs one",
            hint=f"micro_batches of at least {max(asked.turns)}",
        )
    size, most = asked.micro_batch_size, problem.batch // max(asked.turns)
    if size is not None and size > most:
        raise InfeasibleError(
            f"{turns}, and micro_batch_size={size} of a batch of {problem.batch} rows: each rank "
            "that takes turns at a stage needs a micro-batch",
            hint=f"micro_batch_size of at most {most}"
            if most
            else f"a batch of at least {max(asked.turns)} rows",
        )


def _check_devices(problem: Problem) -> None:
    asked, devices, tp = problem.constraints, problem.machine.devices, problem.tp
    pp, dp = sum(asked.turns) if asked.turns else asked.pp or 1, asked.dp or 1
    if pp * dp <= devices:
        return
    ranks = pp if asked.turns else asked.pp
    degrees = [f"{name}={n}" for name, n in (("pp", ranks), ("dp", asked.dp)) if n is not None]
    if tp > 1:
        degrees.append(f"tp={tp}")
    hint = "leave out pp or dp, and the other one follows" if len(degrees) > 1 else None
    spare = problem.machine.spare
    devices_found = f"{problem.machine.existing}" + (
        f", of which tp={tp} leaves {spare} idle" if spare else ""
    )
    raise InfeasibleError(
        f"{' '.join(degrees)} needs {pp * dp * tp} devices, found {devices_found}",
        hint=hint or f"{degrees[0].split('=')[0]} of at most {devices}",
    )


def micro_batches(problem: Problem, dp: int) -> list[int]:
    """Each number of micro-batches that may be, fewest first."""
    asked = problem.constraints.micro_batches
    return [m for m in _profiled(problem, dp) if asked in (None, m)]


def _profiled(problem: Problem, dp: int) -> list[int]:
    """Each number of micro-batches that has a profile, fewest first; each rank has its turn."""
    least = max(problem.constraints.turns or (1,))
    return [m for m in _dividing(problem, dp) if m >= least]


def _dividing(problem: Problem, dp: int) -> list[int]:
    """Each number of micro-batches that has a profile, whatever turns were asked for."""
    if problem.batch % dp:
        return []
    asked = problem.constraints.micro_batch_size
    rows = (profile.rows for profile in problem.profiles if asked in (None, profile.rows))
    counts = (problem.batch // (dp * size) for size in rows)
    return sorted({m for m in counts if m > 0 and profile_of(problem, dp, m) is not None})


def _indivisible(problem: Problem, degrees: list[int]) -> InfeasibleError:
    size, asked = problem.constraints.micro_batch_size, problem.constraints.micro_batches
    rows = [size] if size is not None else [profile.rows for profile in problem.profiles]
    sizes = one_of(rows)
    counts = sorted({m for dp in degrees for m in _profiled(problem, dp)})
    whole = f"a batch of {problem.batch} rows over dp={one_of(degrees)}"
    if turns := problem.constraints.turns:
        most = max((m for dp in degrees for m in _dividing(problem, dp)), default=0)
        if 0 < most < max(turns):
            return InfeasibleError(
                f"turns={','.join(map(str, turns))} was asked for, and {whole} makes no more than "
                f"{most} micro-batches of {sizes} rows: each rank that takes turns at a stage "
                "needs one",
                hint="a larger batch, smaller micro-batches, or fewer turns",
            )
    if asked is not None and counts:
        below = [m for m in counts if m < asked][-1:]
        above = [m for m in counts if m > asked][:1]
        return InfeasibleError(
            f"micro_batches={asked} was asked for, and {whole} does not divide into {asked} "
            f"micro-batches of {sizes} rows",
            hint=f"the nearest that does is micro_batches={one_of(below + above)}",
        )
    least = degrees[0] * min(rows)
    below_rows = problem.batch // least * least
    batches = [rows for rows in (below_rows, below_rows + least) if rows > 0]
    return InfeasibleError(
        f"{whole} does not divide into micro-batches of {sizes} rows",
        hint=f"a batch of {one_of(batches)} rows divides, or give pp and dp other degrees",
    )
