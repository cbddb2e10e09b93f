"""What a decision costs: the one estimate that scores every planner and that none of them owns.

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
    min(2, m) * (S + R')       sends under way: one leaving, one being filled

n_s is the schedule's: m for `gpipe` (Huang et al., GPipe, NeurIPS 2019), min(m, p - s) for `1f1b`
(Narayanan et al., PipeDream, SOSP 2019; Megatron-LM, SC21, section 2.2).

**Seconds** of a micro-batch in stage s, transfers taken as not overlapped, and of the step:

    t_s  = F + B + (R + R') / bandwidth + (2 * latency if R > 0)
    step = sum_s t_s + (m - 1) * max_s t_s + reduce_0

The sum is one micro-batch through all stages and back; each of the others adds one period of the
slowest stage (GPipe, section 2; SC21, section 2.2.1, where all t_s are equal). That is exact for
`gpipe` if B / F is the same in all stages, and an upper bound for `1f1b`, where the warm-up of a
slow stage overlaps with the first micro-batch's way through the stages after it.

    reduce_s = 2 * (dp - 1) / dp * W / bandwidth + 2 * (dp - 1) * latency      0 if dp = 1

is the ring all-reduce of the gradients (Patarasuk and Yuan, JPDC 2009). Stage 0 is the last to
finish its backwards, so only its all-reduce is exposed: the others' hide in the cool-down.

    bubble = 1 - m * mean_s t_s / (sum_s t_s + (m - 1) * max_s t_s)

is the share of the step, all-reduce aside, that the mean stage idles: (p - 1) / (m + p - 1) when
all t_s are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopipe.errors import InfeasibleError
from autopipe.plan import Memory
from autopipe.problem import Crossing, Decision, Problem, Profile, Saved, Shared
from autopipe.schedule import in_flight

Bytes = NDArray[np.int64]
Seconds = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tables:
    """Sums over ranges of units: every field is an array of one shape, an entry per range.

    `tables` gives all ranges, shape (units + 1, units + 1), where entry [i, j] is of the range
    [i, j) and zero unless i < j. `at` selects some of them, in any shape. Seconds and bytes are of
    one micro-batch.
    """

    forward: Seconds
    backward: Seconds
    trainable: Bytes
    constants: Bytes
    saved: Bytes
    received: Bytes
    received_gradient: Bytes
    sent: Bytes
    sent_gradient: Bytes

    def at(self, first: ArrayLike, end: ArrayLike) -> Tables:
        """The ranges [first, end), two index arrays of one shape, which the fields then have."""
        index = np.asarray(first), np.asarray(end)
        return Tables(*(np.asarray(getattr(self, field.name)[index]) for field in fields(self)))


def tables(problem: Problem, profile: Profile) -> Tables:
    """All ranges of the problem's units under one profile; cached, for the last few profiles."""
    return _tables(problem.units, problem.parameters, problem.constants, profile)


# What a stage pays for is a set of items, and an item counts for a range at most once. In the plane
# of ranges (first unit i, end j) the ranges that hold an item with member units p1 < p2 < ... are
# disjoint rectangles, one per member that is the range's first:
#
#     p_{k-1} < i <= p_k < j
#
# A rectangle is two or four corners in a difference array; one running sum along each axis fills
# all of them in.
_Rectangle = tuple[int, int, int, int, int]  # bytes, for first <= i <= last and low <= j <= high


@lru_cache(maxsize=16)
def _tables(
    units: int, parameters: tuple[Shared, ...], constants: tuple[Shared, ...], profile: Profile
) -> Tables:
    returning = tuple(crossing for crossing in profile.crossings if crossing.gradient)
    return Tables(
        forward=_prefix(profile.forward),
        backward=_prefix(profile.backward),
        trainable=_fill(units, _held(units, parameters)),
        constants=_fill(units, _held(units, constants)),
        saved=_fill(units, _saved(units, profile.saved)),
        received=_fill(units, _received(units, profile.crossings)),
        received_gradient=_fill(units, _received(units, returning)),
        sent=_fill(units, _sent(profile.crossings)),
        sent_gradient=_fill(units, _sent(returning)),
    )


def _prefix(seconds: tuple[float, ...]) -> Seconds:
    sums = np.concatenate(([0.0], np.cumsum(seconds)))
    return np.triu(sums[None, :] - sums[:, None])


def _fill(units: int, rectangles: Iterable[_Rectangle]) -> Bytes:
    corners = np.zeros((units + 2, units + 2), dtype=np.int64)
    for size, first, last, low, high in rectangles:
        if first <= last and low <= high:
            corners[first, low] += size
            corners[last + 1, low] -= size
            corners[first, high + 1] -= size
            corners[last + 1, high + 1] += size
    return corners.cumsum(axis=0).cumsum(axis=1)[: units + 1, : units + 1]


def _held(units: int, items: tuple[Shared, ...]) -> Iterable[_Rectangle]:
    for item in items:
        for before, member in zip((-1, *item.units), item.units, strict=False):
            yield item.bytes, before + 1, member, member + 1, units


def _saved(units: int, items: tuple[Saved, ...]) -> Iterable[_Rectangle]:
    for item in items:
        for before, saver in zip((-1, *item.savers), item.savers, strict=False):
            # A range that starts after the producer has received the tensor: see `_received`.
            last = saver if item.producer is None else min(saver, item.producer)
            yield item.bytes, before + 1, last, saver + 1, units


def _received(units: int, items: tuple[Crossing, ...]) -> Iterable[_Rectangle]:
    for item in items:
        for before, user in zip((item.producer, *item.consumers), item.consumers, strict=False):
            yield item.bytes, before + 1, user, user + 1, units


def _sent(items: tuple[Crossing, ...]) -> Iterable[_Rectangle]:
    for item in items:
        yield item.bytes, 0, item.producer, item.producer + 1, item.consumers[-1]


def memory(
    ranges: Tables, problem: Problem, micro_batches: int, in_flight: ArrayLike
) -> tuple[Bytes, ...]:
    """Bytes on one device by what they are for, in the order of the fields of `Memory`.

    `in_flight` broadcasts against the shape of `ranges`; so does each result.
    """
    posted, under_way = min(problem.window, micro_batches), min(2, micro_batches)
    arriving = min(problem.window + 1, micro_batches)
    return (
        ranges.trainable,
        ranges.trainable,
        np.rint(problem.optimizer_factor * ranges.trainable).astype(np.int64),
        ranges.constants,
        np.asarray(in_flight) * (ranges.saved + ranges.received),
        posted * ranges.received
        + arriving * ranges.sent_gradient
        + under_way * (ranges.sent + ranges.received_gradient),
    )


def peak(ranges: Tables, problem: Problem, micro_batches: int, in_flight: ArrayLike) -> Bytes:
    """Peak bytes of one device, the sum of `memory`: linear in the micro-batches in flight."""
    parts = np.broadcast_arrays(*memory(ranges, problem, micro_batches, in_flight))
    return np.asarray(np.sum(parts, axis=0))


def transfer_seconds(ranges: Tables, problem: Problem) -> Seconds:
    """Seconds in which a stage receives a micro-batch and sends its gradients back."""
    moved = (ranges.received + ranges.received_gradient) / problem.bandwidth
    return np.asarray(moved + 2 * problem.latency * (ranges.received > 0))


def stage_seconds(ranges: Tables, problem: Problem) -> Seconds:
    """Seconds of one micro-batch in a stage: t_s of the module's formulas."""
    return np.asarray(ranges.forward + ranges.backward + transfer_seconds(ranges, problem))


def reduce_seconds(ranges: Tables, problem: Problem, dp: int) -> Seconds:
    """Seconds of the ring all-reduce of a stage's gradients over `dp` devices."""
    moved = 2 * (dp - 1) / dp * ranges.trainable / problem.bandwidth
    return np.asarray(moved + 2 * (dp - 1) * problem.latency)


def pipeline_seconds(stages: Seconds, micro_batches: int) -> Seconds:
    """Seconds of a step, all-reduce aside, from t_s along the last axis of `stages`."""
    return np.asarray(stages.sum(axis=-1) + (micro_batches - 1) * stages.max(axis=-1))


@dataclass(frozen=True)
class StageEstimate:
    """One stage, units `first` to `last` inclusive: seconds of a micro-batch, bytes of a device."""

    first: int
    last: int
    forward_seconds: float
    backward_seconds: float
    transfer_seconds: float
    in_flight: int
    memory: Memory

    @property
    def seconds(self) -> float:
        """Seconds of one micro-batch, forward, backward and transfers."""
        return self.forward_seconds + self.backward_seconds + self.transfer_seconds


@dataclass(frozen=True)
class Estimate:
    """What a decision costs.

    Args:
        stages: one per stage.
        step_seconds: of the whole step.
        reduce_seconds: the part of the step in which stage 0 reduces its gradients.
        bubble: share of the step, all-reduce aside, that the mean stage idles.
        fits: no stage needs more than the problem's memory.
        worst: the stage with the highest peak.
        overflow: bytes that it needs beyond the problem's memory; 0 if it fits.
    """

    stages: tuple[StageEstimate, ...]
    step_seconds: float
    reduce_seconds: float
    bubble: float
    fits: bool
    worst: int
    overflow: int


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
            has their rows, or the cuts are not pp - 1 ascending units in 1 .. units - 1.
    """
    pp, dp, m = decision.pp, decision.dp, decision.micro_batches
    profile = _checked_profile(problem, decision)
    bounds = np.array((0, *decision.cuts, problem.units))
    ranges = tables(problem, profile).at(bounds[:-1], bounds[1:])

    flying = [in_flight(decision.schedule, pp, m, stage) for stage in range(pp)]
    parts = memory(ranges, problem, m, flying)
    transfers = transfer_seconds(ranges, problem)
    stages = tuple(
        StageEstimate(
            first=int(bounds[s]),
            last=int(bounds[s + 1]) - 1,
            forward_seconds=float(ranges.forward[s]),
            backward_seconds=float(ranges.backward[s]),
            transfer_seconds=float(transfers[s]),
            in_flight=flying[s],
            memory=Memory(*(int(part[s]) for part in parts)),
        )
        for s in range(pp)
    )

    seconds = stage_seconds(ranges, problem)
    pipeline = float(pipeline_seconds(seconds, m))
    reduce = float(reduce_seconds(ranges, problem, dp)[0])
    worst = max(range(pp), key=lambda s: stages[s].memory.peak)
    overflow = max(0, stages[worst].memory.peak - problem.memory)
    return Estimate(
        stages=stages,
        step_seconds=pipeline + reduce,
        reduce_seconds=reduce,
        bubble=max(0.0, 1 - m * float(seconds.mean()) / pipeline) if pipeline else 0.0,
        fits=overflow == 0,
        worst=worst,
        overflow=overflow,
    )


def _checked_profile(problem: Problem, decision: Decision) -> Profile:
    bounds = (0, *decision.cuts, problem.units)
    ascending = all(first < end for first, end in zip(bounds, bounds[1:], strict=False))
    if len(decision.cuts) != decision.pp - 1 or not ascending:
        raise InfeasibleError(
            f"pp={decision.pp} needs {decision.pp - 1} ascending cuts between 1 and "
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
