"""Seconds of one stage in one place, for every range of units that it may hold.

Let stage s of p hold the units [i, j), a micro-batch have r = batch / (dp * m) rows, and m of them
make up a step. Over one range, `Tables` knows

    F, B     forward and backward seconds              W        trainable bytes
    R, R'    bytes received, and those of them whose gradient goes back

**Memory** of its devices is in `planners.model.memory`, and what its blocks do to fit there in
`planners.model.keeping_less`. The micro-batches in flight, n_s, are the
schedule's: m for `gpipe` (Huang et al., GPipe, NeurIPS 2019), min(m, p - s) for `1f1b` (Narayanan
et al., PipeDream, SOSP 2019; Megatron-LM, SC21, section 2.2). A device with several stages has the
sum of theirs, each at its own fullest.

**Seconds** of a micro-batch in stage s, transfers taken as not overlapped:

    t_s  = F + B + recompute + (R + R') / bandwidth + (2 * latency if R > 0)

Between tensor-parallel groups R and R' may be less, for seconds of gathering
(`planners.model.transfers`).

F and B are those of the stage's kind of device, latency and bandwidth those of the link between its
devices and those of the stage before it; what goes over a link that is shared takes turns. Summing
the gradients of W over the stage's dp devices takes reduce_s (`cluster.collective_time`), of which
the backwards hide some that the stages before it have still to run when it has run its last:

    exposed_s = max(0, reduce_s - sum of B over the units before i)        reduce_s where B is split

Where a later stage has some of its parameters too, their gradients are summed over the devices of
both (`StagePlace.tied`), once the earlier stage has run its last backward.

The stage's own last backward hides some too on GPUs, which sum a bucket as soon as its gradients
are there: of X seconds that may run in it, max(e X, X - B) are left. X is all of reduce_s under
ZeRO-0, under ZeRO-1 the half that scatters; of a split B there is its last half.

ZeRO-2 and 3 have no such sum: in every micro-batch their B scatters gradients, and of ZeRO-3 it and
its F gather parameters, a block ahead. With G and S seconds of these, G1 of the first block of a
forward and GL of a backward, computing of GPUs leaves of them

    max(G1 + e (G - G1), G - F)   and   max(GL + e (G + S - GL), G + S - B)

where e of the seconds are lost to computing that goes on beside them (`efficiency.BESIDE`).

Of fp32 masters copies in 16 bits are gathered, which takes half as long.

Blocks that offload O bytes copy them to the host in F and back in B, over the link that each device
of the stage has to its host. Computing leaves of these copies (`planners.model.offload_ways`)

    max(0, O / host - F)   and   max(0, O / host - B - recompute)

Of a stage at which d ranks take turns, a further micro-batch takes t_s / d, or ceil(m / d) / m of
t_s where they do not have equally many.

Under `eager-1f1b` windows are taken to hide the links: a further micro-batch takes only

    max(F + B + recompute, R / bandwidth, R' / bandwidth)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.cluster import efficiency
from autopipe.cluster.collective_time import (
    Levels,
    gradient_sum,
    half_sum,
    summed_beside,
)
from autopipe.planners.model.devices import DeviceGroup
from autopipe.planners.model.places import StagePlace
from autopipe.planners.model.problem import EAGER, Config, Problem, splits
from autopipe.planners.model.range_tables import Bytes, Tables, Times
from autopipe.planners.model.transfers import (
    gather_seconds,
    transfer_seconds,
    wire_rate,
)

_Exchange = Callable[[float, Levels, int], float]


class Exchanged(NamedTuple):
    """Seconds of ZeRO's gathers and scatters in one micro-batch."""

    gathers: Times
    scatters: Times


def exchanged(
    read: int | Bytes, summed: int | Bytes, problem: Problem, config: Config, group: DeviceGroup
) -> Exchanged:
    """The seconds in which each backward scatters and, under ZeRO-3, it and the forward gather.

    Args:
        read: bytes of the parameters as they are read, frozen ones too.
        summed: bytes of their gradients.
    """
    nothing, streams = np.zeros(()), problem.machine.streams
    half = partial(half_sum, copying=problem.machine.copying)

    def moved(size: int | Bytes) -> Times:
        return _linear(half, size, group.levels, streams)

    return Exchanged(
        moved(read) if config.fully_sharded else nothing,
        moved(summed) if config.scatters else nothing,
    )


def reduce_seconds(ranges: Tables, problem: Problem, config: Config, group: DeviceGroup) -> Times:
    """Seconds in which a stage's gradients are summed over its devices."""
    if config.fully_sharded:
        return np.zeros_like(ranges.earlier)
    copying = problem.machine.copying
    if config.scatters:  # only the parameters, which the next step gathers
        half = partial(half_sum, copying=copying)
        return _linear(half, ranges.read, group.levels, problem.machine.streams)
    summed = partial(gradient_sum, zero=config.zero, copying=copying)
    # Under ZeRO-1 gradients are scattered, and parameters gathered as they are read.
    moved = (ranges.summed + ranges.read) / 2 if config.zero else ranges.summed
    return _linear(summed, moved, group.levels, problem.machine.streams)


def tied_seconds(ranges: Tables, problem: Problem, config: Config, place: StagePlace) -> Times:
    """Seconds more in which gradients are summed that a later stage has too."""
    if not place.tied or not np.any(ranges.onward):
        return np.zeros(())
    copying, streams = problem.machine.copying, problem.machine.streams
    if config.scatters:
        every = partial(gradient_sum, zero=0, copying=copying)
        more = _linear(every, ranges.onward / config.dp, place.tied, streams * config.dp)
    else:
        zero = config.zero if place.group.levels else 0
        every = partial(gradient_sum, zero=zero, copying=copying)
        # Both sums are one; that over the stage's own devices is counted with all others'.
        more = _linear(every, ranges.onward, place.tied, streams)
        if place.group.levels:
            more = more - _linear(every, ranges.onward, place.group.levels, streams)
    return np.where(ranges.onward > 0, np.maximum(more, 0.0), 0.0)


def beside_seconds(ranges: Tables, problem: Problem, config: Config, group: DeviceGroup) -> Times:
    """Seconds of these sums that may run while a stage's last backward makes the gradients."""
    if config.fully_sharded or config.scatters or not problem.machine.overlaps:
        return np.zeros(())
    summed = partial(summed_beside, zero=config.zero, copying=problem.machine.copying)
    return _linear(summed, ranges.summed, group.levels, problem.machine.streams)


def _linear(exchange: _Exchange, sizes: int | Bytes | Times, levels: Levels, streams: int) -> Times:
    """An exchange of many sizes: its seconds are linear in them."""
    least = exchange(0.0, levels, streams)
    each = (exchange(2.0**30, levels, streams) - least) / 2.0**30
    return np.asarray(least + each * sizes)


class StageSeconds(NamedTuple):
    """A stage's seconds in the sum over stages, its period, and the exposed seconds of its sum of
    gradients."""

    whole: Times
    period: Times
    exposed: Times


class Waits(NamedTuple):
    """Seconds of a micro-batch in which a stage waits for something, in forward and in backward."""

    forward: Times
    backward: Times


def least_with(computing: float, moved: float, *, overlaps: bool) -> float:
    """The least seconds of computing and of ZeRO's exchanges, whatever the cuts."""
    lost = efficiency.BESIDE if overlaps else 1.0
    return max(computing + lost * moved, moved)


class StageWork(NamedTuple):
    """The work of ranges for a micro-batch in a place, before anything runs again or offloads.

    `stage_work` makes it; an array that is the same for all ranges has shape ().

    Args:
        problem, config, place: where the work is done.
        forward, backward: seconds of computing, on the place's kind of device.
        exchanged: seconds of ZeRO's gathers and scatters.
        opening, closing: those of gathering the first block of a forward, and of a backward.
        within, between: seconds of gathering tensors that come in parts
            (`transfers.gather_seconds`), and on the link (`transfers.transfer_seconds`).
        carrying: seconds of the longer of both ways over the link, where it may hide.
        sums, beside: seconds of the sum of gradients, and those of them that may run in the last
            backward.
        earlier: seconds in which the stages before it run their last backwards.
    """

    problem: Problem
    config: Config
    place: StagePlace
    forward: Times
    backward: Times
    exchanged: Exchanged
    opening: Times
    closing: Times
    within: Times
    between: Times
    carrying: Times
    sums: Times
    beside: Times
    earlier: Times

    def only(self, wanted: NDArray[np.bool_]) -> StageWork:
        """The work of some ranges, in a row."""

        def some(each: Times) -> Times:
            return np.asarray(each[wanted]) if each.ndim else each

        return self._replace(
            forward=some(self.forward),
            backward=some(self.backward),
            exchanged=Exchanged(*map(some, self.exchanged)),
            opening=some(self.opening),
            closing=some(self.closing),
            within=some(self.within),
            between=some(self.between),
            carrying=some(self.carrying),
            sums=some(self.sums),
            beside=some(self.beside),
            earlier=some(self.earlier),
        )

    def gathering(self, recompute: float | Times) -> Waits:
        """The seconds that ZeRO adds to forward and backward: under ZeRO-3 a gather in each, under
        ZeRO-2 and 3 scattered gradients in backward. On GPUs a block is gathered while the one
        before it computes; nothing hides the first gather.

        Args:
            recompute: seconds that blocks take a second time.
        """
        if not self.config.scatters:
            return Waits(np.zeros(()), np.zeros(()))
        gathers, both = self.exchanged.gathers, sum(self.exchanged, start=np.zeros(()))
        if not self.problem.machine.overlaps:
            return Waits(gathers, both)
        first, last, beside = self.opening, self.closing, efficiency.BESIDE
        backward = self.backward + recompute
        return Waits(
            np.maximum(first + beside * (gathers - first), gathers - self.forward),
            np.maximum(last + beside * (both - last), both - backward),
        )

    def copying(self, recompute: float | Times, offloaded: int | Bytes) -> Waits:
        """Seconds of copies to the host and back that computing does not hide.

        Without a host link, as on a CPU, devices copy within their own memory and wait for it.

        Args:
            recompute: seconds that blocks take a second time.
            offloaded: bytes of a micro-batch.
        """
        if not np.any(offloaded):
            return Waits(np.zeros(()), np.zeros(()))
        host = self.place.group.host
        if not host:
            each = np.asarray(offloaded / self.problem.machine.copying)
            return Waits(each, each)
        each, backward = np.asarray(offloaded / host), self.backward + recompute
        return Waits(np.maximum(each - self.forward, 0), np.maximum(each - backward, 0))

    def seconds(self, recompute: float | Times, offloaded: int | Bytes = 0) -> StageSeconds:
        """Seconds of each stage, with those of running blocks again and of waiting for the host.

        Args:
            recompute: seconds that blocks take a second time.
            offloaded: bytes of a micro-batch.
        """
        config, place = self.config, self.place
        computing = self.forward + self.backward + recompute
        computing = computing + sum(self.gathering(recompute))
        computing = computing + sum(self.copying(recompute, offloaded))
        computing = computing + self.within
        whole = computing + self.between
        if config.schedule != EAGER:
            further = whole
        else:
            further = np.maximum(computing, self.carrying)
        taken = -(-config.micro_batches // place.turns)  # by the rank that has most
        period = np.asarray(further * (taken / config.micro_batches))
        return StageSeconds(whole, period, self._exposed(recompute, offloaded))

    def _exposed(self, recompute: float | Times, offloaded: int | Bytes) -> Times:
        """The seconds of the sum of gradients that no backward hides."""
        if not np.any(self.beside):  # what runs again makes no difference, and no larger array
            return np.asarray(np.maximum(self.sums - self.earlier, 0.0))
        last = self.backward + recompute + self.copying(recompute, offloaded).backward
        if splits(self.problem, self.config.schedule):
            last = last / 2
        left = np.maximum(efficiency.BESIDE * self.beside, self.beside - last)
        return np.asarray(np.maximum(self.sums - self.beside + left - self.earlier, 0.0))


def stage_work(problem: Problem, config: Config, place: StagePlace, ranges: Tables) -> StageWork:
    """The work of ranges in a place.

    Args:
        ranges: as what they receive arrives (`transfers.arriving`).
    """
    kind, group, before = place.group.kind, place.group, place.before
    opening, closing = (
        exchanged(block, 0, problem, config, group).gathers
        for block in (ranges.opening, ranges.closing)
    )
    carrying = np.zeros(())
    if config.schedule == EAGER and before is not None:
        rate = wire_rate(problem, config, before)
        carrying = np.maximum(ranges.received, ranges.received_gradient) / rate
    # Split backwards are put off until all stages end together, and nothing hides behind another.
    hidden = np.zeros(()) if splits(problem, config.schedule) else ranges.earlier
    return StageWork(
        problem=problem,
        config=config,
        place=place,
        forward=ranges.forward[kind],
        backward=ranges.backward[kind],
        exchanged=exchanged(ranges.gathered, ranges.summed, problem, config, group),
        opening=opening,
        closing=closing,
        within=gather_seconds(ranges, problem, kind),
        between=transfer_seconds(ranges, problem, config, before),
        carrying=carrying,
        sums=reduce_seconds(ranges, problem, config, group)
        + tied_seconds(ranges, problem, config, place),
        beside=beside_seconds(ranges, problem, config, group),
        earlier=hidden,
    )
