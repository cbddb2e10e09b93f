"""The pass that puts transfers into compute programs: when to post, wait, send and let go.

    POST F0..Fw-1          as many receives as the window stand ready before anything runs
    ...
    WAIT Fk  POST Fk+w     a buffer is filled, the next one is offered at once
    Fk
    FREE Fk-2  SEND Fk     at most 2 sends to a neighbour are under way, if that suffices
    ...
    WAIT Bk  POST Bk+w     the gradient is here, so the send of Fk has long ended ...
    FREE Fk                ... and the outputs go before backward lets go of what they may view
    Bk
    FREE Bk-2  SEND Bk
    ...
    REDUCE  Bm-1           the last one makes the gradients final, so summing them begins in it
    ...
    FREE ...  STEP         nothing is left under way when the sums are waited for

Receives are posted ahead because a transport moves nothing until both ends are ready: a receive
that is posted when its tensor is needed makes the rank wait for twice the link's latency.

How far either end of a channel runs ahead is in `schedules.lanes`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autopipe.errors import ScheduleError
from autopipe.schedules.instructions import (
    COMPUTE,
    FINAL,
    FLOWS,
    Channel,
    Entries,
    Flow,
    Instruction,
    Kind,
    Program,
    Programs,
    holders,
)
from autopipe.schedules.lanes import SENDS_UNDER_WAY, Side, WireLane, lane_of


class Edge(NamedTuple):
    """Stage `source` sends activations to a later stage `target`, not only the next one.

    With `gradient` their gradients come back the same way.
    """

    source: int
    target: int
    gradient: bool


def edges_of(sent: Iterable[Edge]) -> tuple[Edge, ...]:
    """Merge the edges of single tensors into one edge for each pair of stages, in order.

    An edge carries gradients if any of its tensors has one.
    """
    found: dict[tuple[int, int], bool] = {}
    for source, target, gradient in sent:
        found[source, target] = found.get((source, target), False) or gradient
    return tuple(Edge(*pair, gradient) for pair, gradient in sorted(found.items()))


def insert(
    programs: Programs,
    edges: Sequence[Edge],
    windows: Sequence[int],
    sends_ahead: int = SENDS_UNDER_WAY,
    turns: Sequence[int] = (),
) -> Programs:
    """Compute programs with their transfers: what a rank runs in one step.

    1F1B on two stages, three micro-batches, `Edge(0, 1, gradient=True)`, a window of 1:

        rank 0                                  rank 1
        0POST_B0<1                              1POST_F0<0
        0F0 0SEND_F0>1                          1WAIT_F0<0 1POST_F1<0 1F0
        0F1 0SEND_F1>1                          1B0 1SEND_B0>0
        0WAIT_B0<1 0POST_B1<1 0FREE_F0>1 0B0    1WAIT_F1<0 1POST_F2<0 1F1
        0F2 0SEND_F2>1                          1B1 1SEND_B1>0
        0WAIT_B1<1 0POST_B2<1 0FREE_F1>1 0B1    1WAIT_F2<0 1F2
        0WAIT_B2<1 0FREE_F2>1 0REDUCE 0B2       1REDUCE 1B2 1FREE_B0>0 1SEND_B2>0
        0STEP                                   1FREE_B1>0 1FREE_B2>0 1STEP

    Two stages on one rank exchange tensors just as two on different ranks do. Programs without a
    backward (evaluation) get no gradients, no REDUCE and no STEP.

    Args:
        programs: compute alone, in any order that can run; ranks may hold several stages.
        edges: every pair of stages that exchange tensors, in any order.
        windows: for each boundary s|s+1 between stages, how many receives of a channel across it
            are posted ahead.
        sends_ahead: how many sends between neighbours may be under way, as `sends_for` says.
        turns: for each stage the number of its entries in the programs; the entries take turns at
            micro-batches and count as one stage in `windows`. Empty: one entry each.

    Raises:
        ScheduleError: an edge does not lead to a later stage or stands twice, a window is missing
            or smaller than 1, two stages exchange tensors of other micro-batches, or the programs
            have transfers already.
    """
    entries = Entries.at(turns or (1,) * len(holders(programs)))
    _check(programs, edges, windows, entries)
    orders: dict[Side, list[int]] = defaultdict(list)
    for program in programs:
        for kind, stage, k, _, _ in program:
            if kind in FLOWS:
                orders[stage, FLOWS[kind]].append(k)
    starts = _starts(programs, edges)
    receives: dict[Side, list[WireLane]] = defaultdict(list)
    sends: dict[Side, list[WireLane]] = defaultdict(list)
    for edge in sorted(edges):
        there = Channel(edge.source, edge.target, Flow.ACTIVATION)
        lane = lane_of(there, orders, starts, windows, sends_ahead, entries)
        receives[edge.target, Flow.ACTIVATION].append(lane)
        sends[edge.source, Flow.ACTIVATION].append(lane)
        if edge.gradient:
            back = Channel(edge.target, edge.source, Flow.GRADIENT)
            lane = lane_of(back, orders, starts, windows, sends_ahead, entries)
            # The furthest stage runs its backward first, so its gradient comes first.
            receives[edge.source, Flow.GRADIENT].insert(0, lane)
            sends[edge.target, Flow.GRADIENT].append(lane)
    return tuple(_around(program, receives, sends, starts) for program in programs)


def _starts(programs: Programs, edges: Sequence[Edge]) -> dict[Side, list[int]]:
    """When forwards and backwards start, in each stage's own order, if transfers take no time.

    Each compute instruction takes one unit and runs as soon as it may. The lists end early if the
    programs cannot run at all; `schedules.deadlock` then explains why.
    """
    starts: dict[Side, list[int]] = defaultdict(list)
    ends: dict[Side, dict[int, int]] = defaultdict(dict)
    needs: dict[Side, list[tuple[Side, dict[int, int]]]] = defaultdict(list)
    for source, target, gradient in edges:
        forward = source, Flow.ACTIVATION
        needs[target, Flow.ACTIVATION].append((forward, ends[forward]))
        # Where no gradient comes back, the FREE before a backward waits for the forward's transfer.
        after = target, Flow.GRADIENT if gradient else Flow.ACTIVATION
        needs[source, Flow.GRADIENT].append((after, ends[after]))
    waiting: dict[Side, list[int]] = {}  # ranks, by what they wait for
    clock, position = [0] * len(programs), [0] * len(programs)
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        program, time, index = programs[rank], clock[rank], position[rank]
        while index < len(program):
            kind, stage, k, _, _ = program[index]
            if kind in FLOWS:
                side = stage, FLOWS[kind]
                missing = None
                for need, end in needs[side]:
                    if k not in end:
                        missing = need
                    elif end[k] > time:
                        time = end[k]
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                starts[side].append(time)
                ends[side][k] = time + 1
                if side in waiting:
                    ready += waiting.pop(side)
            time += 1
            index += 1
        clock[rank], position[rank] = time, index
    return starts


def _around(
    program: Program,
    receives: dict[Side, list[WireLane]],
    sends: dict[Side, list[WireLane]],
    starts: dict[Side, list[int]],
) -> Program:
    """One rank's program, with the transfers around each of its compute instructions."""
    last = {i.stage: i for i in program if i.kind in FINAL}
    made = _WithTransfers(receives, sends, starts)
    for compute in program:
        made.add(compute, final=compute is last.get(compute.stage))
    end = [Instruction(Kind.STEP, min(last))] if last else []
    return (*made.posts, *made.body, *made.owed.values(), *end)


class _WithTransfers:
    """One rank's program under construction.

    Attributes:
        posts: the POSTs ahead of everything, in the order of their WAITs.
        body: all instructions after them.
        owed: the FREE of each send under way, by its channel and micro-batch.
    """

    def __init__(
        self,
        receives: dict[Side, list[WireLane]],
        sends: dict[Side, list[WireLane]],
        starts: dict[Side, list[int]],
    ) -> None:
        self.posts: list[Instruction] = []
        self.body: list[Instruction] = []
        self.owed: dict[tuple[Channel, int], Instruction] = {}
        self._receives, self._sends, self._starts = receives, sends, starts
        self._computed: dict[Side, int] = defaultdict(int)  # instructions of each side so far
        self._sent: dict[Channel, int] = defaultdict(int)  # sends of each channel so far

    def add(self, compute: Instruction, *, final: bool) -> None:
        """Add a compute instruction, and the transfers that belong around it.

        Args:
            final: whether it is the last one to make gradients of its stage.
        """
        stage, k, flow = compute.stage, compute.microbatch, FLOWS.get(compute.kind)
        side = stage, flow
        place = self._computed[side]
        self._computed[side] = place + 1
        self._receive(side, k, place)
        if flow is Flow.GRADIENT:
            # Outputs may be views of received tensors, whose buffers return to the pool after
            # this backward. The gradient it takes came from there, so these sends are over.
            for lane in self._sends[stage, Flow.ACTIVATION]:
                self._free(lane.channel, k)
        if final:
            self.body.append(Instruction(Kind.REDUCE, stage))
        self.body.append(compute)
        self._send(side, k, place)
        if flow is Flow.ACTIVATION and self._sends[side]:
            self._free_arrived_gradients(stage, place)

    def _receive(self, side: Side, k: int, place: int) -> None:
        """Wait for what instruction number `place` of a side takes; post the receives behind."""
        stage, flow = side
        for lane in self._receives[side]:
            number = place if lane.comes is None else lane.comes.get(k, -1)
            if number < 0:
                continue
            source, posted = lane.channel.source, lane.posted
            if number < posted[0]:
                self.posts.append(Instruction(Kind.POST, stage, lane.sent[number], flow, source))
            self.body.append(Instruction(Kind.WAIT, stage, k, flow, source))
            for ahead in lane.sent[posted[number] : posted[number + 1]]:
                self.body.append(Instruction(Kind.POST, stage, ahead, flow, source))

    def _send(self, side: Side, k: int, place: int) -> None:
        """Send what instruction number `place` of a side makes, within each channel's bound."""
        stage, flow = side
        for lane in self._sends[side]:
            number = place if lane.leaves is None else lane.leaves.get(k, -1)
            if number < 0:
                continue
            channel = lane.channel
            self._sent[channel] = number + 1
            if number >= lane.bound:
                self._free(channel, lane.sent[number - lane.bound])
            self.body.append(Instruction(Kind.SEND, stage, k, flow, channel.target))
            self.owed[channel, k] = Instruction(Kind.FREE, stage, k, flow, channel.target)

    def _free_arrived_gradients(self, stage: int, place: int) -> None:
        """Free each gradient that was sent before forward number `place`: it has arrived by now."""
        starts = self._starts[stage, Flow.ACTIVATION]
        now = starts[place] if place < len(starts) else -1
        for lane in self._sends[stage, Flow.GRADIENT]:
            last_sent = self._sent[lane.channel] - 1
            arrived = 0 <= last_sent < len(lane.ready) and lane.ready[last_sent] <= now
            if lane.bound == 1 and arrived:
                self._free(lane.channel, lane.sent[last_sent])

    def _free(self, channel: Channel, k: int) -> None:
        if (channel, k) in self.owed:
            self.body.append(self.owed.pop((channel, k)))


def _check(
    programs: Programs, edges: Sequence[Edge], windows: Sequence[int], entries: Entries
) -> None:
    """Refuse impossible arguments of `insert`."""
    num_stages = len(entries.stages)
    seen: set[tuple[int, int]] = set()
    for edge in edges:
        if not 0 <= edge.source < edge.target < num_stages:
            raise ScheduleError(
                f"expected an edge to a later one of {num_stages} stages, "
                f"found {edge.source} -> {edge.target}"
            )
        if edge[:2] in seen:
            raise ScheduleError(f"the edge {edge.source} -> {edge.target} is given twice")
        seen.add(edge[:2])
    between = entries.stages[-1] if entries.stages else -1
    if len(windows) != between:
        raise ScheduleError(
            f"expected a window for each of {between} boundaries, found {len(windows)}"
        )
    for boundary, ahead in enumerate(windows):
        if ahead < 1:
            raise ScheduleError(
                f"expected a window of at least 1 at boundary {boundary}|{boundary + 1}, "
                f"found {ahead}"
            )
    for program in programs:
        for instruction in program:
            if instruction.kind not in COMPUTE:
                raise ScheduleError(
                    f"expected compute instructions alone, found {instruction}: "
                    "these programs have their transfers already"
                )
