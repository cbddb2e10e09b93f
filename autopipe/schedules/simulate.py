"""How long a step takes: the walk through the graph of waits, with times.

The longest path through the graph of `schedules.event_graph` is the predicted step, and every
instruction and every transfer has its place on the way there: a timeline. Seconds count from the
start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopipe.errors import ScheduleError
from autopipe.schedules import deadlock
from autopipe.schedules.event_graph import Delays, EventGraph
from autopipe.schedules.instructions import (
    COMPUTE,
    FLOWS,
    Channel,
    Flow,
    Instruction,
    Kind,
    Programs,
    holders,
)
from autopipe.schedules.transfers import Edge, insert
from autopipe.schedules.validate import Line


class LinkTime(NamedTuple):
    """The link that carries a channel's tensors.

    Attributes:
        latency: seconds one way.
        bandwidth: bytes a second.
        bytes: the bytes of one micro-batch on this channel.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    bytes: float = 0.0

    @property
    def carrying(self) -> float:
        """Seconds for which one micro-batch occupies the wire."""
        return self.bytes / self.bandwidth


LinkTimes = Callable[[Channel], LinkTime]
"""Returns the link of a channel; for a table of links it is `table.__getitem__`."""


def free(channel: Channel) -> LinkTime:
    """A link on which transfers take no time, for any channel."""
    return LinkTime()


@dataclass(frozen=True)
class Costs:
    """Seconds of one micro-batch, one number for each stage, and the links between stages.

    Args:
        forward, backward: seconds of F and of B.
        backward_input, backward_weight: seconds of I and of W, for programs that split B.
        reduce: seconds of the sum of a stage's gradients over replicas.
        links: the link of each channel; not called for two stages on one rank.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    reduce: Sequence[float]
    links: LinkTimes = free

    @staticmethod
    def of(
        forward: Sequence[float],
        backward: Sequence[float],
        *,
        reduce: Sequence[float] | None = None,
        links: LinkTimes = free,
    ) -> Costs:
        """Costs in which I and W take half of B each; sums take no time unless given."""
        half = [seconds / 2 for seconds in backward]
        return Costs(forward, backward, half, half, reduce or [0.0] * len(forward), links)

    @staticmethod
    def even(
        stages: int, forward: float = 1.0, backward: float = 2.0, link: LinkTime | None = None
    ) -> Costs:
        """The same costs for every stage, and the same link for every channel."""
        every = link or LinkTime()
        return Costs.of([forward] * stages, [backward] * stages, links=lambda channel: every)


class TimelineSpan(NamedTuple):
    """An instruction at its place in time, in seconds from the start of the step."""

    rank: int
    instruction: Instruction
    start: float
    end: float


class Moved(NamedTuple):
    """A transfer at its place in time: on the wire from `start` to `sent`, there at `arrival`."""

    channel: Channel
    microbatch: int
    start: float
    sent: float
    arrival: float


@dataclass(frozen=True)
class Timeline:
    """When each instruction and each transfer of a step happens.

    A rank is always at some instruction: each starts when the one before it ends, so the ends
    suffice.

    Args:
        programs: the programs, with their transfers.
        ends: per rank, the second at which each instruction of its program ends.
        transfers: by channel, and in the order of the micro-batches on each channel.
        sums: each sum's start and end. It starts at the end of the backward behind its REDUCE, or
            at the end of the rank's sum before it.
    """

    programs: Programs
    ends: tuple[tuple[float, ...], ...]
    transfers: tuple[Moved, ...]
    sums: tuple[TimelineSpan, ...]

    @property
    def seconds(self) -> float:
        """The predicted step: when the last rank is at the end of its program."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @cached_property
    def spans(self) -> tuple[TimelineSpan, ...]:
        """The instructions that take time, by rank: compute, and WAITs, FREEs, STEPs that wait."""
        found = []
        for rank, (program, ends) in enumerate(zip(self.programs, self.ends, strict=True)):
            start = 0.0
            for instruction, end in zip(program, ends, strict=True):
                if end > start or instruction.kind in COMPUTE:
                    found.append(TimelineSpan(rank, instruction, start, end))
                start = end
        return tuple(found)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds for which each rank computes."""
        seconds = [0.0] * len(self.programs)
        for span in self.spans:
            if span.instruction.kind in COMPUTE:
                seconds[span.rank] += span.end - span.start
        return tuple(seconds)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the step for which each rank does not compute."""
        return tuple(1 - busy / self.seconds if self.seconds else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The mean over the ranks of `bubbles`."""
        return sum(self.bubbles) / len(self.bubbles) if self.bubbles else 0.0


def simulate(programs: Programs, costs: Costs) -> Timeline:
    """The timeline of programs, after a proof that they can run, as by `deadlock.check`.

    Programs of compute alone get the transfers of a chain of stages: from each stage to the next,
    with receives posted well ahead.

    Raises:
        ScheduleError: the programs cannot run to their end, or the costs are of another number of
            stages.
    """
    stages = len(holders(programs))
    if len(costs.forward) != stages:
        raise ScheduleError(f"expected costs of {stages} stages, found {len(costs.forward)}")
    if stages > 1 and all(i.kind in COMPUTE for program in programs for i in program):
        programs = insert(programs, _chain(programs), [_WIDE] * (stages - 1))
    graph = deadlock.graph(programs)
    walk = deadlock.run(graph, _delays(graph, costs))
    reduces = [[i for i in program if i.kind is Kind.REDUCE] for program in programs]
    return Timeline(
        programs,
        tuple(map(tuple, walk.ends)),
        tuple(
            Moved(graph.channels[channel], k, *times)
            for (channel, k), *times in zip(
                graph.transfers, walk.starts, walk.sent, walk.arrived, strict=True
            )
        ),
        tuple(
            TimelineSpan(rank, instruction, *times)
            for rank, spans in enumerate(walk.sums)
            for instruction, times in zip(reduces[rank], spans, strict=True)
        ),
    )


def even_seconds(programs: Programs) -> float:
    """Seconds of a step of programs of compute alone, if stages are equal and links take no time.

    F, I and W take one second each, B two. The result is that of `simulate` with `Costs.even`; it
    takes a tenth of the time.

    Args:
        programs: with a backward for each forward.

    Raises:
        ScheduleError: the programs cannot run to their end.
    """
    last = len(holders(programs)) - 1
    over: dict[tuple[Flow, int, int], float] = {}
    clocks, at = [0.0] * len(programs), [0] * len(programs)
    while True:
        before = sum(at)
        for rank, program in enumerate(programs):
            for kind, stage, microbatch, *_ in program[at[rank] :]:
                flow, begin = FLOWS.get(kind), clocks[rank]
                ahead = stage - 1 if flow is Flow.ACTIVATION else stage + 1
                if flow is not None and 0 <= ahead <= last:
                    if (flow, ahead, microbatch) not in over:
                        break
                    begin = max(begin, over[flow, ahead, microbatch])
                clocks[rank] = begin + (2.0 if kind is Kind.BACKWARD else 1.0)
                if flow is not None:
                    over[flow, stage, microbatch] = clocks[rank]
                at[rank] += 1
        if sum(at) == before:
            break
    if before == sum(map(len, programs)):
        return max(clocks)
    return simulate(programs, Costs.even(last + 1)).seconds  # its error follows the deadlock


_WIDE = 1 << 30  # a window that no step is longer than


def _chain(programs: Programs) -> list[Edge]:
    """Each stage to the next, with a gradient where both run a backward."""
    back = {i.stage for program in programs for i in program if i.kind in COMPUTE[1:3]}
    stages = range(len(holders(programs)) - 1)
    return [Edge(stage, stage + 1, {stage, stage + 1} <= back) for stage in stages]


def _delays(graph: EventGraph, costs: Costs) -> Delays:
    """The costs in the graph's own order."""
    seconds = {
        Kind.FORWARD: costs.forward,
        Kind.BACKWARD: costs.backward,
        Kind.BACKWARD_INPUT: costs.backward_input,
        Kind.BACKWARD_WEIGHT: costs.backward_weight,
        Kind.REDUCE: costs.reduce,
    }

    def of(line: Line) -> float:
        kind, stage, *_ = line
        return seconds[kind][stage] if kind in seconds else 0.0

    links = [
        costs.links(channel)
        if graph.holder[channel.source] != graph.holder[channel.target]
        else LinkTime()
        for channel in graph.channels
    ]
    return Delays(
        [
            np.array([of(line) for line in table.lines])[table.line].tolist()
            for table in graph.tables
        ],
        [link.latency for link in links],
        [link.carrying for link in links],
    )
