"""What a decision costs: the one estimate that scores every planner and that none of them owns.

It is for searching. The plan that is found is walked and its step simulated (`autopipe.draft`,
`autopipe.forecast`); those are the figures that the plan has.

Of p stages and m micro-batches let t_s be the seconds of a micro-batch in stage s, and reduce_s
those of summing its gradients. A step takes

    step = sum_s t_s + (m - 1) * max_s t_s + max_s exposed_s

The sum is one micro-batch through all stages and back; each of the others adds one period of the
slowest stage (GPipe, section 2; SC21, section 2.2.1, where all t_s are equal). That is exact for
`gpipe` if B / F is the same in all stages, and an upper bound for `1f1b`, where the warm-up of a
slow stage overlaps with the first micro-batch's way through the stages after it. Stage 0 is the
last to finish its backwards; of the others' sums of gradients that is exposed which the cool-down
does not hide (`autopipe.stage_costs`).

Of any schedule with v stages on each rank

    step = f / v * sum_s t_s + (v * m - f) * max_s t_s + max_s exposed_s

with f the part of a micro-batch's seconds in a rank for which each further rank waits while the
pipeline fills and drains: 1 for 1f1b, gpipe and eager-1f1b, m for naive, 1/3 for zb-h1 with enough
micro-batches. f is counted: it is what makes the formula exact for the schedule's own programs
where stages are alike, F = I = W, and links are free. For `eager-1f1b` at depth e the largest is no
less than (sum_s (F + B) + 2 latencies of every boundary) / (1 + (p - 1) (1 + e)), the law of
`autopipe.law` for the whole pipeline. A problem that is `steady` asks for the period alone,

    step = m * max_s (t_s + reduce_s / m)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from autopipe.errors import InfeasibleError
from autopipe.plan import Memory
from autopipe.problem import Constraints, Decision, Frame, Problem, Profile
from autopipe.reruns import blocks_of, compositions, figures
from autopipe.schedule import Programs, holders
from autopipe.schedules import flying, in_flight, make, named
from autopipe.simulate import Costs, simulate
from autopipe.stage_costs import (
    EAGER,
    Place,
    Seconds,
    costs,
    gather_seconds,
    memory,
    sets_of,
    stage_seconds,
    transfer_seconds,
)
from autopipe.tables import Times, tables


def weights(problem: Problem, frame: Frame) -> tuple[float, float]:
    """Of the sum and of the largest of a pipeline's stages in the seconds of a step."""
    if problem.steady:
        return 0.0, float(frame.micro_batches)
    asked, m = problem.constraints, frame.micro_batches
    chunks = chunks_of(asked, frame.schedule)
    if frame.pp == 1 and chunks == 1:
        return 1.0, m - 1.0
    if asked.programs:
        filling = _filling(asked.programs, m)
    elif frame.schedule in ("1f1b", "gpipe", EAGER):
        filling = 1.0
    elif frame.schedule == "naive":
        filling = float(m)
    else:
        ranks = min(frame.pp, MOST_RANKS)
        counted = math.ceil(m * ranks / frame.pp)
        if counted >= 3 * ranks:  # from two a rank on it repeats
            counted = 2 * ranks + counted % ranks
        filling = named_filling(frame.schedule, ranks, counted, chunks)
    return filling / chunks, chunks * m - filling


MOST_RANKS = 8
"""Ranks of the pipeline that f is counted in; in longer ones it is that of as many micro-batches a
rank."""


@lru_cache(maxsize=1024)
def named_filling(schedule: str, ranks: int, micro_batches: int, chunks: int) -> float:
    """f of a schedule that has a name.

    Where its own law is known it is not counted. ZB-H1 idles (p - 1) (F + B - W) (Qi et al., "Zero
    Bubble Pipeline Parallelism", 2023, section 2.3), and W more for each micro-batch that there is
    less than p; ZB-V as long from 2 p micro-batches on. An interleaved pipeline idles (p - 1)
    (F + B) / v where p divides m (Narayanan et al., SC 2021, section 2.2.2), and all but one of a
    micro-batch's chunks more for each that there is less than p.
    """
    if ranks == 1:
        return 1.0
    missing = max(0, ranks - micro_batches) / (ranks - 1)
    if schedule == "zb-h1":
        return (1 + missing) / 3
    if schedule == "zb-v" and micro_batches >= 2 * ranks:
        return 1 / 3
    if schedule == "interleaved" and (micro_batches % ranks == 0 or missing):
        return 1 + (chunks - 1) * missing
    return _filling(make(schedule, ranks, micro_batches, chunks=chunks), micro_batches)


@lru_cache(maxsize=16)
def _filling(programs: Programs, micro_batches: int) -> float:
    """f of the module's formulas, from the step that equal stages take without transfers."""
    stages, ranks = len(holders(programs)), len(programs)
    if ranks == 1:
        return 1.0
    step = simulate(programs, Costs.even(stages)).seconds
    return (step / 3.0 - stages / ranks * micro_batches) / (ranks - 1)


def floor_seconds(problem: Problem, frame: Frame) -> float:
    """What the period of eager-1f1b is at least, whatever the cuts; else 0.

    The links are those between the first groups, in rank order, whichever hold the stages.
    """
    if frame.schedule != EAGER or frame.pp == 1:
        return 0.0
    profile = profile_of(problem, frame.dp, frame.micro_batches)
    assert profile is not None, "a frame has a profile"
    quickest = min(
        math.fsum((*forward, *backward))
        for forward, backward in zip(profile.forward, profile.backward, strict=True)
    )
    links = [problem.machine.link(frame.dp, *pair).link for pair in pairwise(range(frame.pp))]
    way = quickest + 2 * sum(link.latency for link in links)
    return way / (1 + (frame.pp - 1) * (1 + frame.depth))


def step_seconds(stages: Seconds, weights: tuple[float, float], floor: float = 0.0) -> Times:
    """Seconds of a step from those of its stages along the last axis."""
    slowest = np.maximum(stages.period.max(axis=-1), floor)
    through = weights[0] * stages.whole.sum(axis=-1) + weights[1] * slowest
    return np.asarray(through + stages.exposed.max(axis=-1))


@dataclass(frozen=True)
class StageEstimate:
    """One stage, units `first` to `last` inclusive: seconds of a micro-batch, bytes of a device.

    `period` are the seconds that each further micro-batch takes: all of them, or, where transfers
    are hidden, those of computing or of the wire.
    """

    first: int
    last: int
    forward_seconds: float
    backward_seconds: float
    transfer_seconds: float
    period: float
    in_flight: int
    memory: Memory


@dataclass(frozen=True)
class Estimate:
    """What a decision costs.

    Args:
        stages: one per stage.
        step_seconds: of the whole step.
        spent: where a device's seconds of a step go, on average, by what they are for.
        fits: no device needs more than it may hold.
        worst: the stages of the device that needs most beyond what it may hold, or is nearest to
            it.
        limit: bytes that that device may hold.
        overflow: bytes that they need beyond it; 0 if they fit.
    """

    stages: tuple[StageEstimate, ...]
    step_seconds: float
    spent: Mapping[str, float]
    fits: bool
    worst: tuple[int, ...]
    limit: int
    overflow: int

    @property
    def spare(self) -> int:
        """Bytes that the device nearest to its limit has left, where all fit."""
        return self.limit - sum(self.stages[stage].memory.peak for stage in self.worst)


def chunks_of(constraints: Constraints, schedule: str) -> int:
    """How many stages each rank holds under a schedule."""
    if constraints.programs:
        return len(holders(constraints.programs)) // len(constraints.programs)
    return named(schedule).chunks or constraints.chunks or FEWEST_CHUNKS


FEWEST_CHUNKS = 2
"""Stages on each rank under the schedule interleaved, where nobody asks for more: with one it is
1f1b."""


@lru_cache(maxsize=1024)
def in_flights(problem: Problem, frame: Frame) -> tuple[int, ...]:
    """Of each stage of a pipeline, the most micro-batches whose activations it holds at once."""
    asked = problem.constraints
    if asked.programs:
        ranks = holders(asked.programs)
        return tuple(flying(asked.programs[rank], stage) for stage, rank in enumerate(ranks))
    chunks = chunks_of(asked, frame.schedule)
    depths = (frame.depth,) * (frame.pp - 1) if named(frame.schedule).depths else ()
    return tuple(
        in_flight(
            frame.schedule, frame.pp, frame.micro_batches, stage, chunks=chunks, depths=depths
        )
        for stage in range(frame.pp * chunks)
    )


@lru_cache(maxsize=256)
def placement(constraints: Constraints, schedule: str, pp: int) -> tuple[int, ...]:
    """The rank of each stage of a pipeline."""
    if constraints.programs:
        return holders(constraints.programs)
    return holders(make(schedule, pp, 1, chunks=chunks_of(constraints, schedule)))


def places(problem: Problem, frame: Frame, groups: Sequence[int]) -> tuple[Place, ...]:
    """What each stage is given if the pipeline's ranks have these groups of devices."""
    ranks = placement(problem.constraints, frame.schedule, frame.pp)
    held = in_flights(problem, frame)
    row = [groups[rank] for rank in ranks]
    return tuple(
        place_of(problem, frame, stage, held[stage], group, row[stage - 1] if stage else None)
        for stage, group in enumerate(row)
    )


def place_of(
    problem: Problem, frame: Frame, stage: int, held: int, group: int, earlier: int | None
) -> Place:
    """What a stage is given.

    Args:
        held: its micro-batches in flight.
        group, earlier: the numbers of its group of devices, and of the stage's before it.
    """
    machine = problem.machine
    linked = earlier is not None and earlier != group
    own = machine.groups(frame.dp)[group]
    beyond = problem.beyond.get(frame.schedule, 0)
    return Place(
        held,
        replace(own, memory=own.memory - beyond) if beyond else own,
        machine.link(frame.dp, earlier, group) if earlier is not None and linked else None,
        chunks_of(problem.constraints, frame.schedule),
    )


def profile_of(problem: Problem, dp: int, micro_batches: int) -> Profile | None:
    """The profile of a micro-batch; None if the batch does not divide so or none was made."""
    rows, rest = divmod(problem.batch, dp * micro_batches)
    if rest:
        return None
    return next((profile for profile in problem.profiles if profile.rows == rows), None)


def estimate(problem: Problem, decision: Decision) -> Estimate:
    """Score a decision by the formulas above.

    Raises:
        InfeasibleError: the batch does not divide into the decision's micro-batches, no profile
            has their rows, or the cuts are no ascending units between 1 and units - 1.
    """
    frame = decision.frame
    profile = _checked_profile(problem, decision)
    bounds = (0, *decision.cuts, problem.units)
    groups = decision.groups or tuple(range(frame.pp))
    found = places(problem, frame, groups)
    again = decision.recompute or ((),) * decision.stages
    stages = [
        _stage(problem, frame, profile, place, bounds[s : s + 2], again[s])
        for s, place in enumerate(found)
    ]
    seconds = Seconds(*map(np.array, zip(*(stage.seconds for stage in stages), strict=True)))
    step = step_seconds(seconds, weights(problem, frame), floor_seconds(problem, frame))
    ranks = placement(problem.constraints, frame.schedule, frame.pp)
    beyond = [-found[ranks.index(rank)].group.memory for rank in range(frame.pp)]
    for stage, rank in zip(stages, ranks, strict=True):
        beyond[rank] += stage.estimate.memory.peak
    worst = max(range(frame.pp), key=lambda rank: beyond[rank])
    spent: dict[str, float] = defaultdict(float)
    for stage in stages:
        for cause, amount in stage.spent.items():
            spent[cause] += amount * frame.micro_batches / frame.pp
    spent["reducing gradients"] = float(seconds.exposed.max())
    spent["the bubble"] = max(0.0, float(step) - math.fsum(spent.values()))
    return Estimate(
        stages=tuple(stage.estimate for stage in stages),
        step_seconds=float(step),
        spent=spent,
        fits=beyond[worst] <= 0,
        worst=tuple(s for s, rank in enumerate(ranks) if rank == worst),
        limit=found[ranks.index(worst)].group.memory,
        overflow=max(0, beyond[worst]),
    )


def settle(
    problem: Problem, frame: Frame, cuts: tuple[int, ...], groups: tuple[int, ...]
) -> Decision:
    """The decision that these cuts and groups of devices make: what must run again does."""
    profile = profile_of(problem, frame.dp, frame.micro_batches)
    assert profile is not None, "a frame has a profile"
    of, numbers, again = tables(problem, profile), compositions(problem).number, []
    bounds = (0, *cuts, problem.units)
    for place, first, last in zip(places(problem, frame, groups), bounds, bounds[1:], strict=False):
        own = numbers[first, last]
        found = costs(problem, frame, place, of.at(first, last), own)
        counts = sets_of(problem, frame, place).counts[int(found.again)]
        again.append(blocks_of(problem, first, last, counts))
    return Decision(frame, cuts, tuple(again), groups)


class _Stage(NamedTuple):
    estimate: StageEstimate
    seconds: Seconds
    spent: Mapping[str, float]


def _stage(
    problem: Problem,
    frame: Frame,
    profile: Profile,
    place: Place,
    bounds: tuple[int, ...],
    blocks: Sequence[int],
) -> _Stage:
    """One stage [first, last) of which these blocks run again."""
    first, last = bounds
    ranges = tables(problem, profile).at(first, last)
    kind, dropped, extra = place.group.kind, 0, 0.0
    for block in blocks:
        start, stop = problem.reruns[block]
        part = max(first - start, 0), min(last, stop) - start
        saves, costs = figures(problem, profile.rows, kind, block, part)
        dropped, extra = dropped + saves, extra + costs
    held = dropped if problem.reruns_hold == "all" else 0
    if dropped and problem.reruns_hold == "one":
        sets = sets_of(problem, frame, place)
        held = int(sets.largest[compositions(problem).number[first, last]])
    parts = memory(ranges, problem, frame, place.in_flight, dropped, held)
    seconds = stage_seconds(problem, frame, place, ranges, extra)
    gathering = float(gather_seconds(ranges.trainable, problem, frame, place.group))
    transfers = float(transfer_seconds(ranges, problem, frame, place.before))
    forward, backward = float(ranges.forward[kind]), float(ranges.backward[kind])
    exchange = float(ranges.exchange[kind]) if ranges.exchange else 0.0
    found = StageEstimate(
        first=first,
        last=last - 1,
        forward_seconds=forward + gathering,
        backward_seconds=backward + 2 * gathering + extra,
        transfer_seconds=transfers,
        period=float(seconds.period),
        in_flight=place.in_flight,
        memory=Memory(*(int(part) for part in parts)),
    )
    spent = {
        "computing": forward + backward - exchange,
        "running blocks again": extra,
        "tensor-parallel exchanges": exchange,
        "gathering parameters": 3 * gathering,
        "transfers": transfers,
    }
    return _Stage(found, seconds, spent)


def _checked_profile(problem: Problem, decision: Decision) -> Profile:
    frame = decision.frame
    bounds = (0, *decision.cuts, problem.units)
    ascending = all(first < end for first, end in zip(bounds, bounds[1:], strict=False))
    stages = frame.pp * chunks_of(problem.constraints, frame.schedule)
    if decision.stages != stages or not ascending:
        raise InfeasibleError(
            f"pp={frame.pp} needs {stages - 1} ascending cuts between 1 and "
            f"{problem.units - 1}, found {decision.cuts}"
        )
    profile = profile_of(problem, frame.dp, frame.micro_batches)
    if profile is None:
        rows = ", ".join(str(profile.rows) for profile in problem.profiles)
        raise InfeasibleError(
            f"a batch of {problem.batch} rows over dp={frame.dp} and "
            f"micro_batches={frame.micro_batches} does not give micro-batches of a size that "
            f"was profiled ({rows} rows)"
        )
    return profile
