"""The pass that puts transfers into compute programs: when to post, wait, send and let go.

    POST F0..Fw-1          as many receives as the window stand ready before anything runs
    ...
    WAIT Fk  POST Fk+w     a buffer is filled, the next one is offered at once
    Fk
    FREE Fk-2  SEND Fk     at most 2 sends to a neighbour are under way, if that will do
    ...
    WAIT Bk  POST Bk+w     the gradient is here, so the send of Fk has long ended ...
    FREE Fk                ... and the outputs go before backward lets go of what they may view
    Bk
    FREE Bk-2  SEND Bk
    ...
    REDUCE  Bm-1           the last one makes the gradients final, so summing them begins in it
    ...
    FREE ...  STEP         nothing is left under way when the sums are waited for

Why receives are posted ahead: a transport moves nothing until both ends are ready, so a receive
that is posted when its tensor is needed costs the link's latency twice, and all of it exposed.

A channel moves its tensors in the order in which the source makes them. Receives are posted in that
order and waited for in the target's own, which may be another one; then as many are posted as the
next one to be needed has before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from autopipe.errors import ScheduleError
from autopipe.schedules.instructions import (
    FLOWS,
    Channel,
    Flow,
    Instruction,
    Kind,
    Program,
    Programs,
    holders,
)

SENDS_UNDER_WAY = 2
"""How many sends of a channel between neighbours may be under way: one on the wire, one behind."""


def sends_for(depths: Sequence[int]) -> int:
    """How many sends of a channel may be under way, by what runs ahead on purpose.

    Where something does, a wire is kept busy by the send behind the one it carries. Where nothing
    does, a send is over long before the next one, and one tensor less of each channel is held.

    Args:
        depths: one per boundary, or none.
    """
    return SENDS_UNDER_WAY if any(depths) else 1


class Edge(NamedTuple):
    """Stage `source` sends activations to a later stage `target`, not only the next one.

    With `gradient` their gradients come back the same way.
    """

    source: int
    target: int
    gradient: bool


def insert(
    programs: Programs,
    edges: Sequence[Edge],
    windows: Sequence[int],
    sends_ahead: int = SENDS_UNDER_WAY,
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

    Raises:
        ScheduleError: an edge does not lead to a later stage or stands twice, a window is missing
            or smaller than 1, two stages exchange tensors of other micro-batches, or the programs
            have transfers already.
    """
    _check(programs, edges, windows)
    orders: dict[_Side, list[int]] = defaultdict(list)
    for program in programs:
        for kind, stage, k, _, _ in program:
            if kind in FLOWS:
                orders[stage, FLOWS[kind]].append(k)
    starts = _starts(programs, edges)
    receives: dict[_Side, list[_WireLane]] = defaultdict(list)
    sends: dict[_Side, list[_WireLane]] = defaultdict(list)
    for edge in sorted(edges):
        there = Channel(edge.source, edge.target, Flow.ACTIVATION)
        lane = _lane(there, orders, starts, windows, sends_ahead)
        receives[edge.target, Flow.ACTIVATION].append(lane)
        sends[edge.source, Flow.ACTIVATION].append(lane)
        if edge.gradient:
            back = Channel(edge.target, edge.source, Flow.GRADIENT)
            lane = _lane(back, orders, starts, windows, sends_ahead)
            # The furthest stage runs its backward first, so its gradient comes first.
            receives[edge.source, Flow.GRADIENT].insert(0, lane)
            sends[edge.target, Flow.GRADIENT].append(lane)
    return tuple(_around(program, receives, sends, starts) for program in programs)


def window(channel: Channel, windows: Sequence[int]) -> int:
    """How many receives of `channel` are posted ahead: the widest window of those it spans."""
    low, high = sorted((channel.source, channel.target))
    return max(windows[low:high])


def sends_under_way(channel: Channel, sends_ahead: int = SENDS_UNDER_WAY) -> int:
    """How many sends of `channel` may at least be under way: one more for each boundary it skips.

    A pipeline runs that much further ahead of the far end of a skip connection.
    """
    return sends_ahead + abs(channel.target - channel.source) - 1


_Side = tuple[int, Flow | None]  # a stage's forwards, its backwards, or what moves nothing


class _WireLane(NamedTuple):
    """A channel and how the tensors of one step pass through it.

    Attributes:
        sent: micro-batches, in the order of the source and so of the channel.
        posted: how many receives have been posted when the target waits for its first tensor, its
            second, ... and when it has them all.
        bound: how many sends may be under way.
        ready: when each receive has been posted, in the order of the channel, in a run of compute
            alone (`_starts`).
    """

    channel: Channel
    sent: list[int]
    posted: list[int]
    bound: int
    ready: list[int]


def _lane(
    channel: Channel,
    orders: dict[_Side, list[int]],
    starts: dict[_Side, list[int]],
    windows: Sequence[int],
    sends_ahead: int,
) -> _WireLane:
    """Decide how far either end of a channel runs ahead of the other.

    Receives are ahead by the window, or by all that comes before the next tensor that is needed.

    The bound of sends stops a source that runs ahead, and for good where it holds up what the
    target needs before it takes more. So look at a run of compute alone (`_starts`), count the
    sends that no receive awaits at that moment, and allow as many and the next one. Each wait that
    the bound makes is then for a receive that this run has posted by that time: transfers keep the
    order of a run that exists and cannot lock it up, whatever the schedule, the skip connections
    and the windows.
    """
    source, target = (channel.source, channel.flow), (channel.target, channel.flow)
    sent, taken = orders[source], orders[target]
    place = {k: number for number, k in enumerate(sent)}
    for k in {*sent} ^ {*taken}:
        one, other = channel[:2] if k in place else channel[1::-1]
        raise ScheduleError(
            f"stage {one} runs {channel.flow.value}{k}, and stage {other}, with which it exchanges "
            "tensors, never does"
        )
    ahead = window(channel, windows)
    wanted = (max(number + ahead, place[k] + 1) for number, k in enumerate(taken))
    posted = [min(len(sent), count) for count in accumulate(wanted, max)] + [len(sent)]

    bound, waits = sends_under_way(channel, sends_ahead), 0
    for number, start in enumerate(starts[source]):
        while waits < len(starts[target]) and starts[target][waits] <= start:
            waits += 1
        bound = max(bound, number - posted[waits] + 1)
    ready = [-1] * posted[0]
    for number, start in enumerate(starts[target]):
        ready += [start] * (posted[number + 1] - posted[number])
    return _WireLane(channel, sent, posted, bound, ready)


def _starts(programs: Programs, edges: Sequence[Edge]) -> dict[_Side, list[int]]:
    """When forwards and backwards start, in each stage's own order, if transfers take no time.

    Each compute instruction takes one unit and runs as soon as it may. The lists end early where
    the programs cannot run even so; `schedules.deadlock` says why.
    """
    starts: dict[_Side, list[int]] = defaultdict(list)
    ends: dict[_Side, dict[int, int]] = defaultdict(dict)
    needs: dict[_Side, list[tuple[_Side, dict[int, int]]]] = defaultdict(list)
    for source, target, gradient in edges:
        forward = source, Flow.ACTIVATION
        needs[target, Flow.ACTIVATION].append((forward, ends[forward]))
        # Where no gradient comes back, the FREE before a backward waits for the forward's transfer.
        after = target, Flow.GRADIENT if gradient else Flow.ACTIVATION
        needs[source, Flow.GRADIENT].append((after, ends[after]))
    waiting: dict[_Side, list[int]] = {}  # ranks, by what they wait for
    clock, position = [0] * len(programs), [0] * len(programs)
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        program, now, here = programs[rank], clock[rank], position[rank]
        while here < len(program):
            kind, stage, k, _, _ = program[here]
            if kind in FLOWS:
                side = stage, FLOWS[kind]
                missing = None
                for need, end in needs[side]:
                    if k not in end:
                        missing = need
                    elif end[k] > now:
                        now = end[k]
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                starts[side].append(now)
                ends[side][k] = now + 1
                if side in waiting:
                    ready += waiting.pop(side)
            now += 1
            here += 1
        clock[rank], position[rank] = now, here
    return starts


def _around(
    program: Program,
    receives: dict[_Side, list[_WireLane]],
    sends: dict[_Side, list[_WireLane]],
    starts: dict[_Side, list[int]],
) -> Program:
    """One rank's program with what stands around each of its compute instructions."""
    last = {i.stage: i for i in program if i.kind in _FINAL}
    posts: list[Instruction] = []  # those ahead of everything, in the order of their WAITs
    body: list[Instruction] = []
    owed: dict[tuple[Channel, int], Instruction] = {}  # the FREE of each send under way
    counts: dict[_Side, int] = defaultdict(int)

    def free(channel: Channel, k: int) -> None:
        if (channel, k) in owed:
            body.append(owed.pop((channel, k)))

    for compute in program:
        kind, stage, k, _, _ = compute
        flow = FLOWS.get(kind)
        side = stage, flow
        number = counts[side]
        counts[side] = number + 1
        for (source, _, _), sent, posted, _, _ in receives[side]:
            if number < posted[0]:
                posts.append(Instruction(Kind.POST, stage, sent[number], flow, source))
            body.append(Instruction(Kind.WAIT, stage, k, flow, source))
            for ahead in sent[posted[number] : posted[number + 1]]:
                body.append(Instruction(Kind.POST, stage, ahead, flow, source))
        if flow is Flow.GRADIENT:
            # Outputs may be views of received tensors, whose buffers return to the pool after
            # this backward. The gradient it takes came from there, so these sends are over.
            for channel, _, _, _, _ in sends[stage, Flow.ACTIVATION]:
                if (channel, k) in owed:
                    body.append(owed.pop((channel, k)))
        if compute is last.get(stage):
            body.append(Instruction(Kind.REDUCE, stage))
        body.append(compute)
        for channel, sent, _, bound, _ in sends[side]:
            if number >= bound:
                free(channel, sent[number - bound])
            body.append(Instruction(Kind.SEND, stage, k, flow, channel.target))
            owed[channel, k] = Instruction(Kind.FREE, stage, k, flow, channel.target)
        if flow is Flow.ACTIVATION and sends[side]:
            # A gradient that went before this forward is there by now, and its memory is wanted.
            now = starts[side][number] if number < len(starts[side]) else -1
            for channel, sent, _, bound, ready in sends[stage, Flow.GRADIENT]:
                gone = counts[stage, Flow.GRADIENT]
                if bound == 1 and 0 < gone <= len(ready) and ready[gone - 1] <= now:
                    free(channel, sent[gone - 1])
    end = [Instruction(Kind.STEP, min(last))] if last else []
    return (*posts, *body, *owed.values(), *end)


_FINAL = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)  # with the last of these, gradients are final


def _check(programs: Programs, edges: Sequence[Edge], windows: Sequence[int]) -> None:
    """Refuse what cannot be meant, so that the pass may trust its arguments."""
    num_stages = len(holders(programs))
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
    if len(windows) != num_stages - 1:
        raise ScheduleError(
            f"expected a window for each of {num_stages - 1} boundaries, found {len(windows)}"
        )
    for boundary, ahead in enumerate(windows):
        if ahead < 1:
            raise ScheduleError(
                f"expected a window of at least 1 at boundary {boundary}|{boundary + 1}, "
                f"found {ahead}"
            )
    for program in programs:
        for instruction in program:
            if instruction.kind not in _COMPUTE:
                raise ScheduleError(
                    f"expected compute instructions alone, found {instruction}: "
                    "these programs have their transfers already"
                )


_COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
