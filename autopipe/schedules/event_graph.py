"""Programs as one graph of waits, and the walk through it: how far they run, and when.

The model is the strictest transport there is: a transfer is ONE event that happens when both ends
are ready for it and the transfer before it on its lane is over. Nothing is buffered.

    SEND at the source --+                +--> WAIT at the target
                         +--> transfer ---+
    POST at the target --+       |        +--> FREE at the source
                                 v
                      the lane's next transfer

With the order of each program this is a graph in which everything waits for ALL its predecessors.
Such a graph can be run in any order that its edges allow and always gets equally far, so walking it
once is a proof: the walk comes to the end of every program, or what is left holds a cycle.

With `Delays` the same walk tells the time of everything, that is the longest path to it:

    start   = max(SEND issued, POST issued + latency, wire free)     the POST's notice has to cross
    sent    = start + seconds on the wire                            FREE ends, the wire is free
    arrived = sent + latency                                         WAIT ends

A wire is an ordered pair of ranks; it carries one tensor at a time, in the order in which they
become ready. Two stages on one rank have no wire between them: their transfers take no time.

REDUCE starts what is left of a sum when the compute instruction after it ends: its seconds are
without those of buckets that are summed by then. A rank's sums follow each other and
run beside everything else; STEP ends after the last of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import repeat

from autopipe.schedules.instructions import Channel, Kind, Programs
from autopipe.schedules.validate import ProgramTable

COMPUTE, SEND, POST, WAIT, FREE, REDUCE, STEP = range(7)
"""The kinds of instructions that the walk distinguishes."""

NEVER = math.inf

CODES = {
    Kind.FORWARD: COMPUTE,
    Kind.BACKWARD: COMPUTE,
    Kind.BACKWARD_INPUT: COMPUTE,
    Kind.BACKWARD_WEIGHT: COMPUTE,
    Kind.POST: POST,
    Kind.WAIT: WAIT,
    Kind.SEND: SEND,
    Kind.FREE: FREE,
    Kind.REDUCE: REDUCE,
    Kind.STEP: STEP,
}


@dataclass(frozen=True, eq=False)
class EventGraph:
    """Programs whose transfers are numbered, a channel's in the order in which they are issued.

    Args:
        programs: the programs.
        tables: the programs as arrays.
        holder: the rank of each stage.
        codes: per rank, the kind of each instruction: COMPUTE, SEND, ...
        numbers: per rank, the number of each instruction's transfer; 0 if it has none.
        channels: the channels that are used.
        transfers: by number, the index of a transfer's channel and its micro-batch.
        lanes: transfers that must be over before another starts on the same lane, as pairs.
    """

    programs: Programs
    tables: Sequence[ProgramTable]
    holder: Sequence[int]
    codes: Sequence[Sequence[int]]
    numbers: Sequence[Sequence[int]]
    channels: Sequence[Channel]
    transfers: Sequence[tuple[int, int]]
    lanes: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, eq=False)
class Delays:
    """Seconds of the instructions and transfers of an `EventGraph`.

    Args:
        instructions: per rank, the seconds of each instruction; a REDUCE has those of its sum.
        latency: for each channel, seconds one way.
        carrying: for each channel, the seconds for which one of its tensors occupies the wire.
    """

    instructions: Sequence[Iterable[float]]
    latency: Sequence[float]
    carrying: Sequence[float]


@dataclass(frozen=True, eq=False)
class Walk:
    """How far the programs came, and when, in seconds from the start.

    Args:
        ends: per rank, the end of each instruction that it finished.
        starts, sent, arrived: for each transfer by number; `NEVER` if it did not happen.
        sums: per rank, the start and the end of each REDUCE's sum, in order.
    """

    ends: list[list[float]]
    starts: list[float]
    sent: list[float]
    arrived: list[float]
    sums: list[list[tuple[float, float]]]


def walk(graph: EventGraph, delays: Delays | None = None) -> Walk:
    """Run every program as far as it goes; without `delays` nothing takes time.

    Each rank is a generator that runs its program and yields the transfers that it has to wait for.
    When no rank can go on, the transfer that is ready first happens and wakes the ranks that wait
    for it. Transfers that this makes ready are ready at a later time, so each wire carries its
    transfers in the right order.
    """
    delays = delays or _no_delays(graph)
    waiting, carrying = _Pending(graph), delays.carrying
    channel_of = [channel for channel, _ in graph.transfers]
    wires = [_wire(graph, channel) for channel in graph.channels]
    wire_free = dict.fromkeys(wires, 0.0)
    ranks, total = range(len(graph.programs)), len(graph.transfers)
    starts, sent, arrived = ([NEVER] * total for _ in range(3))
    found = Walk([[] for _ in ranks], starts, sent, arrived, [[] for _ in ranks])

    asleep: defaultdict[int, list[Iterator[int]]] = defaultdict(list)
    awake = [_run(graph, delays, rank, waiting, found) for rank in ranks]
    while True:
        for program in awake:
            number = next(program, None)
            if number is not None:
                asleep[number].append(program)
        if not waiting.queue:
            return found
        start, number = heappop(waiting.queue)
        channel = channel_of[number]
        wire = wires[channel]
        if wire is not None:
            start = max(start, wire_free[wire])
            wire_free[wire] = start + carrying[channel]
        starts[number] = start
        sent[number] = start + carrying[channel]
        arrived[number] = start + carrying[channel] + delays.latency[channel]
        for after in waiting.following.get(number, ()):
            waiting.offer(after, start + carrying[channel])
        awake = asleep.pop(number, [])


def _no_delays(graph: EventGraph) -> Delays:
    nothing = [0.0] * len(graph.channels)
    return Delays([repeat(0.0, len(program)) for program in graph.programs], nothing, nothing)


class _Pending:
    """The transfers that have not happened yet, by number: what each still waits for.

    Attributes:
        queue: transfers that can start, by the time from which they can.
        following: for each transfer, those that wait for it on a lane.
    """

    def __init__(self, graph: EventGraph) -> None:
        total = len(graph.transfers)
        self.ready = [0.0] * total  # the latest of what a transfer waits for, so far
        self.missing = [2] * total  # how many are still to come: SEND, POST, lane predecessors
        self.queue: list[tuple[float, int]] = []
        self.following: defaultdict[int, list[int]] = defaultdict(list)
        for before, after in graph.lanes:
            self.following[before].append(after)
            self.missing[after] += 1

    def offer(self, number: int, time: float) -> None:
        """Note that one of the events that a transfer waits for has happened, at `time`."""
        if time > self.ready[number]:
            self.ready[number] = time
        self.missing[number] -= 1
        if not self.missing[number]:
            heappush(self.queue, (self.ready[number], number))


def _run(
    graph: EventGraph, delays: Delays, rank: int, waiting: _Pending, walk: Walk
) -> Iterator[int]:
    """Run one rank's program; yield each transfer that it has to wait for."""
    transfers, latency = graph.transfers, delays.latency
    arrived, sent, offer = walk.arrived, walk.sent, waiting.offer
    done, sums = walk.ends[rank], walk.sums[rank]
    now = summing = 0.0
    armed: float | None = None
    for code, number, spent in zip(
        graph.codes[rank], graph.numbers[rank], delays.instructions[rank], strict=False
    ):
        if code == COMPUTE:
            now += spent
            if armed is not None:
                begin = max(now, summing)
                summing = begin + armed
                sums.append((begin, summing))
                armed = None
        elif code == SEND:
            offer(number, now)
        elif code == POST:
            offer(number, now + latency[transfers[number][0]])
        elif code == WAIT or code == FREE:
            over = arrived if code == WAIT else sent
            if over[number] == NEVER:
                yield number
            now = max(now, over[number])
        elif code == REDUCE:
            armed = spent
        else:
            now = max(now, summing)
        done.append(now)


def _wire(graph: EventGraph, channel: Channel) -> tuple[int, int] | None:
    """The ordered pair of ranks that a channel connects; None within a rank."""
    source, target = graph.holder[channel.source], graph.holder[channel.target]
    return None if source == target else (source, target)
