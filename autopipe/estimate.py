"""What a decision costs: the one estimate that scores every planner and that none of them owns.

It is for searching. The plan that is found is walked and its step simulated (`autopipe.draft`,
`autopipe.forecast`); those are the figures that the plan has.

Let stage s of p hold the units [i, j), a micro-batch have r = batch / (dp * m) rows, and m of them
make up a step. Over one range, `Tables` knows

    F, B     forward and backward seconds              W, C     trainable and constant bytes
    A        bytes saved from forward to backward
    R, R'    bytes received, and those of them whose gradient goes back
    S, S'    bytes sent, and those of them whose gradient comes back

**Memory** of a device of stage s, n_s being its micro-batches in flight:

    W                          parameters
    W                          gradients
    optimizer_factor * W       optimizer state
    C                          buffers and frozen parameters
    n_s * (A + R)              activations: what is received is kept until its backward
    min(window, m) * R         receives posted ahead
    min(window + 1, m) * S'    the same for gradients, and the one that backward is using
    S + min(2, m) * R'         sends under way: one leaving, and a gradient that is being made

n_s is the schedule's: m for `gpipe` (Huang et al., GPipe, NeurIPS 2019), min(m, p - s) for `1f1b`
(Narayanan et al., PipeDream, SOSP 2019; Megatron-LM, SC21, section 2.2). A device with several
stages has the sum of theirs, each at its own fullest. ZeRO divides the optimizer state (1), or
parameters and gradients too (3), by dp, and 3 adds what it gathers (`Tables.gathered`).

**Seconds** of a micro-batch in stage s, transfers taken as not overlapped, and of the step:

    t_s  = F + B + (R + R') / bandwidth + (2 * latency if R > 0)
    step = sum_s t_s + (m - 1) * max_s t_s + reduce_0

The sum is one micro-batch through all stages and back; each of the others adds one period of the
slowest stage (GPipe, section 2; SC21, section 2.2.1, where all t_s are equal). That is exact for
`gpipe` if B / F is the same in all stages, and an upper bound for `1f1b`, where the warm-up of a
slow stage overlaps with the first micro-batch's way through the stages after it.

    reduce_s = 2 * (dp - 1) / dp * W / bandwidth + 2 * (dp - 1) * latency      0 if dp = 1

is the ring all-reduce of the gradients (Patarasuk and Yuan, JPDC 2009). Stage 0 is the last to
finish its backwards, so only its all-reduce is exposed: the others' hide in the cool-down. ZeRO-3
has none: its F and B gather and scatter, which takes 3 / 2 of it in every micro-batch.

Other schedules are scored roughly. With v stages on each rank, and f the part of a micro-batch's
seconds in a stage for which each further rank waits while the pipeline fills and drains,

    step = f / v * sum_s t_s + (v * m - f) * max_s t_s + reduce_0

    f = 1      gpipe, 1f1b, interleaved        1/3    zb-h1 and zb-v, if F, I and W are alike
        m      naive: nothing overlaps         1      a written schedule, whatever it is

which without transfers is exact where all stages are alike, F = I = W, and there are enough
micro-batches (a multiple of p for interleaved, 2 p for zb-v). For `eager-1f1b` depths and windows
are taken to hide the links: max_s is that of max(F + B, R / bandwidth, R' / bandwidth).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from autopipe.errors import InfeasibleError
from autopipe.plan import Memory
from autopipe.problem import Constraints, Decision, Problem, Profile
from autopipe.schedule import holders
from autopipe.schedules import flying, in_flight, make, named
from autopipe.tables import Bytes, Seconds, Tables, tables


def memory(
    ranges: Tables, problem: Problem, micro_batches: int, in_flight: ArrayLike, dp: int = 1
) -> tuple[Bytes, ...]:
    """Bytes on one device by what they are for, in the order of the fields of `Memory`.

    `in_flight` broadcasts against the shape of `ranges`; so does each result.
    """
    posted, arriving = (min(problem.window + n, micro_batches) for n in (0, 1))
    leaving = min(2, micro_batches)
    whole, dealt = ranges.trainable, -(-ranges.trainable // dp)
    fully = problem.zero == 3 and dp > 1
    return (
        dealt + ranges.gathered if fully else whole,
        dealt if fully else whole,
        np.rint(problem.optimizer_factor * (dealt if problem.zero else whole)).astype(np.int64),
        ranges.constants,
        np.asarray(in_flight) * (ranges.saved + ranges.received),
        posted * ranges.received
        + arriving * ranges.sent_gradient
        + ranges.sent
        + leaving * ranges.received_gradient,
    )


def peak(
    ranges: Tables, problem: Problem, micro_batches: int, in_flight: ArrayLike, dp: int = 1
) -> Bytes:
    """Peak bytes of one device, the sum of `memory`: linear in the micro-batches in flight."""
    parts = np.broadcast_arrays(*memory(ranges, problem, micro_batches, in_flight, dp))
    return np.asarray(np.sum(parts, axis=0))


def compute_seconds(ranges: Tables, problem: Problem, dp: int = 1) -> tuple[Seconds, Seconds]:
    """Seconds of a forward and of a backward: F and B, and gathering under ZeRO-3.

    Each gathers all parameters, backward scatters the gradients too, each half a ring all-reduce.
    """
    if problem.zero < 3:
        return ranges.forward, ranges.backward
    ring = _ring(ranges, problem, dp)
    return np.asarray(ranges.forward + ring / 2), np.asarray(ranges.backward + ring)


def transfer_seconds(ranges: Tables, problem: Problem) -> Seconds:
    """Seconds in which a stage receives a micro-batch and sends its gradients back."""
    moved = (ranges.received + ranges.received_gradient) / problem.bandwidth
    return np.asarray(moved + 2 * problem.latency * (ranges.received > 0))


def stage_seconds(ranges: Tables, problem: Problem, dp: int = 1) -> Seconds:
    """Seconds of one micro-batch in a stage: t_s of the module's formulas."""
    return sum(compute_seconds(ranges, problem, dp), transfer_seconds(ranges, problem))


def periods(ranges: Tables, problem: Problem, schedule: str, dp: int = 1) -> Seconds:
    """Seconds that a stage takes for each further micro-batch."""
    if schedule != "eager-1f1b":
        return stage_seconds(ranges, problem, dp)
    forward, backward = compute_seconds(ranges, problem, dp)
    carrying = np.maximum(ranges.received, ranges.received_gradient) / problem.bandwidth
    return np.asarray(np.maximum(forward + backward, carrying))


def reduce_seconds(ranges: Tables, problem: Problem, dp: int) -> Seconds:
    """Seconds in which a stage's gradients are summed over `dp` devices when they are made."""
    return _ring(ranges, problem, dp) if problem.zero < 3 else np.zeros_like(ranges.forward)


def _ring(ranges: Tables, problem: Problem, dp: int) -> Seconds:
    """A ring all-reduce of the trainable bytes over `dp` devices."""
    moved = 2 * (dp - 1) / dp * ranges.trainable / problem.bandwidth
    return np.asarray(moved + 2 * (dp - 1) * problem.latency)


def weights(problem: Problem, schedule: str, micro_batches: int) -> tuple[float, float]:
    """Of the sum and of the largest of a pipeline's stages in the seconds of a step."""
    chunks = chunks_of(problem.constraints, schedule)
    filling = float(micro_batches) if schedule == "naive" else _FILLING.get(schedule, 1.0)
    return filling / chunks, chunks * micro_batches - filling


_FILLING = {"zb-h1": 1 / 3, "zb-v": 1 / 3}
"""f of the module's formulas, where it is not 1."""


def pipeline_seconds(stages: Seconds, periods: Seconds, weights: tuple[float, float]) -> Seconds:
    """Seconds of a step, all-reduce aside, from those of its stages along the last axis."""
    return np.asarray(weights[0] * stages.sum(axis=-1) + weights[1] * periods.max(axis=-1))


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
        reduce_seconds: the part of the step in which stage 0 reduces its gradients.
        fits: no device needs more than the problem's memory.
        worst: the stages of the fullest device.
        overflow: bytes that they need beyond the problem's memory; 0 if they fit.
    """

    stages: tuple[StageEstimate, ...]
    step_seconds: float
    reduce_seconds: float
    fits: bool
    worst: tuple[int, ...]
    overflow: int


def chunks_of(constraints: Constraints, schedule: str) -> int:
    """How many stages each rank holds under a schedule."""
    if constraints.programs:
        return len(holders(constraints.programs)) // len(constraints.programs)
    return named(schedule).chunks or constraints.chunks or FEWEST_CHUNKS


FEWEST_CHUNKS = 2
"""Stages on each rank under the schedule interleaved, where nobody asks for more: with one it is
1f1b."""


def in_flights(problem: Problem, schedule: str, pp: int, micro_batches: int) -> tuple[int, ...]:
    """Of each stage of a pipeline, the most micro-batches whose activations it holds at once."""
    asked = problem.constraints
    if asked.programs:
        ranks = holders(asked.programs)
        return tuple(flying(asked.programs[rank], stage) for stage, rank in enumerate(ranks))
    chunks = chunks_of(asked, schedule)
    depths = (asked.depth or 0,) * (pp - 1) if named(schedule).depths else ()
    return tuple(
        in_flight(schedule, pp, micro_batches, stage, chunks=chunks, depths=depths)
        for stage in range(pp * chunks)
    )


@lru_cache(maxsize=256)
def placement(constraints: Constraints, schedule: str, pp: int) -> tuple[int, ...]:
    """The rank of each stage of a pipeline."""
    if constraints.programs:
        return holders(constraints.programs)
    return holders(make(schedule, pp, 1, chunks=chunks_of(constraints, schedule)))


def room(problem: Problem, schedule: str) -> int:
    """Bytes that a stage may hold so that a device's stages fit it together, whatever the others.

    A device's memory in equal shares: enough, and for several stages a device more than is needed.
    """
    return problem.memory // chunks_of(problem.constraints, schedule)


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
    pp, dp, m = decision.pp, decision.dp, decision.micro_batches
    profile = _checked_profile(problem, decision)
    bounds = np.array((0, *decision.cuts, problem.units))
    ranges = tables(problem, profile).at(bounds[:-1], bounds[1:])

    held = in_flights(problem, decision.schedule, pp, m)
    parts = memory(ranges, problem, m, held, dp)
    forward, backward = compute_seconds(ranges, problem, dp)
    transfers = transfer_seconds(ranges, problem)
    further = periods(ranges, problem, decision.schedule, dp)
    stages = tuple(
        StageEstimate(
            first=int(bounds[s]),
            last=int(bounds[s + 1]) - 1,
            forward_seconds=float(forward[s]),
            backward_seconds=float(backward[s]),
            transfer_seconds=float(transfers[s]),
            period=float(further[s]),
            in_flight=held[s],
            memory=Memory(*(int(part[s]) for part in parts)),
        )
        for s in range(decision.stages)
    )

    pipeline = pipeline_seconds(
        stage_seconds(ranges, problem, dp),
        further,
        weights(problem, decision.schedule, m),
    )
    reduce = float(reduce_seconds(ranges, problem, dp)[0])
    ranks = placement(problem.constraints, decision.schedule, pp)
    devices = [0] * pp
    for stage, rank in zip(stages, ranks, strict=True):
        devices[rank] += stage.memory.peak
    fullest = max(devices)
    overflow = max(0, fullest - problem.memory)
    return Estimate(
        stages=stages,
        step_seconds=float(pipeline) + reduce,
        reduce_seconds=reduce,
        fits=overflow == 0,
        worst=tuple(s for s, rank in enumerate(ranks) if rank == devices.index(fullest)),
        overflow=overflow,
    )


def _checked_profile(problem: Problem, decision: Decision) -> Profile:
    bounds = (0, *decision.cuts, problem.units)
    ascending = all(first < end for first, end in zip(bounds, bounds[1:], strict=False))
    stages = decision.pp * chunks_of(problem.constraints, decision.schedule)
    if decision.stages != stages or not ascending:
        raise InfeasibleError(
            f"pp={decision.pp} needs {stages - 1} ascending cuts between 1 and "
            f"{problem.units - 1}, found {decision.cuts}"
        )
    profile = profile_of(problem, decision.dp, decision.micro_batches)
    if profile is None:
        rows = ", ".join(str(profile.rows) for profile in problem.profiles)
        raise InfeasibleError(
            f"a batch of {problem.batch} rows over dp={decision.dp} and "
            f"micro_batches={decision.micro_batches} does not give micro-batches of a size that "
            f"was profiled ({rows} rows)"
        )
    return profile
