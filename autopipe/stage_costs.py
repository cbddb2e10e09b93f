"""What one stage costs in one place: seconds of a micro-batch, and bytes on each of its devices.

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
    n_s * (A - D + R) + d      activations: what is received is kept until its backward
    min(window, m) * R         receives posted ahead
    min(window + 1, m) * S'    the same for gradients, and the one that backward is using
    S + min(2, m) * R'         sends under way: one leaving, and a gradient that is being made

n_s is the schedule's: m for `gpipe` (Huang et al., GPipe, NeurIPS 2019), min(m, p - s) for `1f1b`
(Narayanan et al., PipeDream, SOSP 2019; Megatron-LM, SC21, section 2.2). D and d are what blocks
that run again save and hold (`autopipe.reruns`). A device with several stages has the sum of
theirs, each at its own fullest. ZeRO divides the optimizer state (1), or parameters and gradients
too (3), by dp, and 3 adds what it gathers (`Tables.gathered`).

**Seconds** of a micro-batch in stage s, transfers taken as not overlapped:

    t_s  = F + B + again + (R + R') / bandwidth + (2 * latency if R > 0)

F and B are those of the stage's kind of device, latency and bandwidth those of the link between its
devices and those of the stage before it; what goes over a link that is shared takes turns. Summing
the gradients of W over the stage's dp devices takes reduce_s (`autopipe.communication`), of which
the backwards hide some that the stages before it have still to run when it has run its last:

    exposed_s = max(0, reduce_s - sum of B over the units before i)        reduce_s where B is split

ZeRO-3 has no such sum: its F and B gather and scatter, which takes 3 / 2 of it in every
micro-batch.

Under `eager-1f1b` windows are taken to hide the links: a further micro-batch takes only

    max(F + B + again, R / bandwidth, R' / bandwidth)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from autopipe.communication import Level, Levels, all_gather, gradient_sum
from autopipe.machine import Group
from autopipe.problem import Frame, Problem, splits
from autopipe.reruns import Numbers, Reruns, reruns
from autopipe.tables import Bytes, Tables, Times

EAGER = "eager-1f1b"

_Exchange = Callable[[float, Levels, int], float]


def memory(
    ranges: Tables,
    problem: Problem,
    frame: Frame,
    in_flight: int | Bytes,
    dropped: int | Bytes = 0,
    again: int | Bytes = 0,
) -> tuple[Bytes, ...]:
    """Bytes on one device by what they are for, in the order of the fields of `Memory`.

    `in_flight`, and D and d, `dropped` and `again`, broadcast against the shape of `ranges`; so
    does each result.
    """
    micro_batches, dp, zero = frame.micro_batches, frame.dp, frame.zero
    posted, arriving = (min(problem.window + n, micro_batches) for n in (0, 1))
    leaving = min(2, micro_batches)
    whole, dealt = ranges.trainable, -(-ranges.trainable // dp)
    fully = frame.fully_sharded
    return (
        dealt + ranges.gathered if fully else whole,
        dealt if fully else whole,
        np.rint(problem.optimizer_factor * (dealt if zero else whole)).astype(np.int64),
        ranges.constants,
        np.asarray(in_flight) * (ranges.saved - dropped + ranges.received) + again,
        posted * ranges.received
        + arriving * ranges.sent_gradient
        + ranges.sent
        + leaving * ranges.received_gradient,
        # From the second micro-batch on; what ZeRO-3 gathers is counted with its gradients.
        ranges.largest if micro_batches > 1 and not fully else np.zeros_like(ranges.largest),
    )


def peak(ranges: Tables, problem: Problem, frame: Frame, in_flight: int | Bytes) -> Bytes:
    """Peak bytes of one device, the sum of `memory`: linear in the micro-batches in flight."""
    return sum_of(memory(ranges, problem, frame, in_flight))


def sum_of(parts: tuple[Bytes, ...]) -> Bytes:
    """The sum of `memory`."""
    return np.asarray(sum(parts[1:], start=parts[0]))


def gather_seconds(trainable: int | Bytes, problem: Problem, frame: Frame, group: Group) -> Times:
    """Seconds of making ZeRO-3's parameters whole once; scattering their gradients takes as long.

    A forward gathers, and a backward gathers and scatters.

    Args:
        trainable: bytes of the parameters.
    """
    if not frame.fully_sharded:
        return np.zeros(np.shape(trainable))
    return _linear(all_gather, trainable, group.levels, problem.machine.streams)


def reduce_seconds(ranges: Tables, problem: Problem, frame: Frame, group: Group) -> Times:
    """Seconds in which a stage's gradients are summed over its devices when they are made."""
    if frame.fully_sharded:
        return np.zeros_like(ranges.earlier)
    copying = problem.machine.copying
    summed = partial(gradient_sum, zero=frame.zero, copying=copying)
    return _linear(summed, ranges.trainable, group.levels, problem.machine.streams)


def _linear(exchange: _Exchange, sizes: int | Bytes, levels: Levels, streams: int) -> Times:
    """An exchange of many sizes: its seconds are linear in them."""
    least = exchange(0.0, levels, streams)
    each = (exchange(2.0**30, levels, streams) - least) / 2.0**30
    return np.asarray(least + each * sizes)


def transfer_seconds(ranges: Tables, problem: Problem, frame: Frame, before: Level | None) -> Times:
    """Seconds in which a stage receives a micro-batch and sends its gradients back."""
    if problem.steady and frame.pp > 1:
        before = problem.machine.link(frame.dp, 0, 1)
    if before is None:
        return np.zeros_like(ranges.earlier)
    moved = ranges.received + ranges.received_gradient
    if problem.steady:
        moved = moved + ranges.sent + ranges.sent_gradient
    seconds = moved / _rate(problem, frame, before)
    return np.asarray(seconds + 2 * before.link.latency * (ranges.received > 0))


def _rate(problem: Problem, frame: Frame, level: Level) -> float:
    """Bytes a second for each of the devices of a stage."""
    return level.wire(frame.dp * problem.machine.streams).bandwidth


class Place(NamedTuple):
    """What a stage is given: micro-batches in flight, devices, and the link to those before it.

    `shares` are the stages that a device holds, each of which may have that part of it.
    """

    in_flight: int
    group: Group
    before: Level | None
    shares: int

    @property
    def room(self) -> int:
        """Bytes that the stage may hold, so that a device's stages fit together."""
        return self.group.memory // self.shares


class Seconds(NamedTuple):
    """What a stage adds to the sum of all, its period, and how long after the last backward of
    stage 0 its gradients are summed."""

    whole: Times
    period: Times
    exposed: Times


class Costs(NamedTuple):
    """Of stages that might be: their seconds, bytes, and what runs again.

    `again` are numbers of sets in `autopipe.reruns`.
    """

    seconds: Seconds
    peaks: Bytes
    again: Bytes


def costs(problem: Problem, frame: Frame, place: Place, ranges: Tables, numbers: Numbers) -> Costs:
    """The costs of ranges in a place, blocks running again as far as they must.

    Args:
        numbers: the ranges' compositions (`autopipe.reruns`).
    """
    sets = sets_of(problem, frame, place)
    peaks = peak(ranges, problem, frame, place.in_flight)
    held, stays = held_again(problem, place.in_flight, sets.largest[numbers])
    missing = np.where(peaks > place.room, peaks - place.room + held, 0)
    again = sets.cheapest(numbers, -(-missing // max(stays, 1)))
    saves = sets.bytes[again]
    with_again = peaks - stays * saves + np.where(saves > 0, held, 0)
    # Where nothing fits anyway, what is nearest to it.
    again = np.where(with_again < peaks, again, sets.starts[numbers])
    peaks = np.minimum(with_again, peaks)
    return Costs(stage_seconds(problem, frame, place, ranges, sets.seconds[again]), peaks, again)


def held_again(problem: Problem, in_flight: int, largest: Bytes) -> tuple[Bytes, int]:
    """Bytes that are there once if any block runs again, and how often a block's are saved."""
    if problem.reruns_hold == "one":
        return largest, in_flight
    return np.zeros_like(largest), in_flight - (problem.reruns_hold == "all")


def sets_of(problem: Problem, frame: Frame, place: Place) -> Reruns:
    """The sets of blocks that may run again in a place."""
    rows = problem.batch // (frame.dp * frame.micro_batches)
    return reruns(problem, rows, place.group.kind, not splits(problem, frame.schedule))


def stage_seconds(
    problem: Problem, frame: Frame, place: Place, ranges: Tables, again: float | Times
) -> Seconds:
    """The seconds of a stage, with those that blocks take a second time."""
    kind = place.group.kind
    gathering = gather_seconds(ranges.trainable, problem, frame, place.group)
    computing = ranges.forward[kind] + ranges.backward[kind] + again + 3 * gathering
    whole = computing + transfer_seconds(ranges, problem, frame, place.before)
    reduce = reduce_seconds(ranges, problem, frame, place.group)
    if problem.steady:
        return Seconds(whole, np.asarray(whole + reduce / frame.micro_batches), 0 * reduce)
    if frame.schedule != EAGER or place.before is None:
        further = computing if frame.schedule == EAGER else whole
    else:
        rate = _rate(problem, frame, place.before)
        carrying = np.maximum(ranges.received, ranges.received_gradient) / rate
        further = np.maximum(computing, carrying)
    # Split backwards are put off until all stages end together, and nothing hides behind another.
    hidden = 0.0 if splits(problem, frame.schedule) else ranges.earlier
    return Seconds(whole, np.asarray(further), np.maximum(reduce - hidden, 0.0))
