"""The pass that puts transfers into compute programs: when to post, wait, send and let go.

    POST F0..Fw-1          as many receives as the window stand ready before anything runs
    ...
    WAIT Fk  POST Fk+w     a buffer is filled, the next one is offered at once
    Fk
    FREE Fk-2  SEND Fk     at most 2 sends to a neighbour are under way
    ...
    WAIT Bk  POST Bk+w     the gradient is here, so the send of Fk has long ended ...
    FREE Fk                ... and the outputs go before backward lets go of what they may view
    Bk
    FREE Bk-2  SEND Bk
    ...
    FREE ...  REDUCE       nothing is left under way when the gradients are summed

Why receives are posted ahead: a transport moves nothing until both ends are ready, so a receive
that is posted when its tensor is needed costs the link's latency twice, and all of it exposed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from autopipe.errors import ScheduleError
from autopipe.schedule import FLOWS, Channel, Flow, Instruction, Kind, Program, Programs

SENDS_UNDER_WAY = 2
"""How many sends of a channel between neighbours may be under way. With 1, a stage that runs ahead
stops at each send until the one before has crossed; more keep more tensors alive."""


class Edge(NamedTuple):
    """Stage `source` sends activations to a later stage `target`, not only the next one.

    With `gradient` their gradients come back the same way.
    """

    source: int
    target: int
    gradient: bool


def insert(programs: Programs, edges: Sequence[Edge], windows: Sequence[int]) -> Programs:
    """Compute programs with their transfers: what a rank runs in one step.

    1F1B on two stages, three micro-batches, `Edge(0, 1, gradient=True)`, a window of 1:

        rank 0                                  rank 1
        0POST_B0<1                              1POST_F0<0
        0F0 0SEND_F0>1                          1WAIT_F0<0 1POST_F1<0 1F0
        0F1 0SEND_F1>1                          1B0 1SEND_B0>0
        0WAIT_B0<1 0POST_B1<1 0FREE_F0>1 0B0    1WAIT_F1<0 1POST_F2<0 1F1
        0F2 0SEND_F2>1                          1B1 1SEND_B1>0
        0WAIT_B1<1 0POST_B2<1 0FREE_F1>1 0B1    1WAIT_F2<0 1F2
        0WAIT_B2<1 0FREE_F2>1 0B2               1B2 1FREE_B0>0 1SEND_B2>0
        0REDUCE                                 1FREE_B1>0 1FREE_B2>0 1REDUCE

    Programs without a backward (evaluation) get no gradients and no REDUCE.

    Args:
        programs: compute alone; rank r holds stage r, micro-batches are numbered from 0.
        edges: every pair of stages that exchange tensors, in any order.
        windows: for each boundary i|i+1, how many receives of a channel across it are posted ahead.

    Raises:
        ScheduleError: an edge does not lead to a later stage or stands twice, a window is missing
            or smaller than 1, or the programs have transfers already.
    """
    _check(programs, edges, windows)
    train = any(instruction.kind in _BACKWARD for program in programs for instruction in program)
    receives: dict[tuple[int, Flow], list[Channel]] = defaultdict(list)
    sends: dict[tuple[int, Flow], list[Channel]] = defaultdict(list)
    for edge in sorted(edges):
        there = Channel(edge.source, edge.target, Flow.ACTIVATION)
        receives[there.target, Flow.ACTIVATION].append(there)
        sends[there.source, Flow.ACTIVATION].append(there)
        if edge.gradient and train:
            back = Channel(edge.target, edge.source, Flow.GRADIENT)
            # The furthest stage runs its backward first, so its gradient comes first.
            receives[back.target, Flow.GRADIENT].insert(0, back)
            sends[back.source, Flow.GRADIENT].append(back)
    full = []
    for stage, program in enumerate(programs):
        reduce = [Instruction(Kind.REDUCE, stage)] if train else []
        full.append((*_around(program, receives, sends, windows), *reduce))
    return tuple(full)


def window(channel: Channel, windows: Sequence[int]) -> int:
    """How many receives of `channel` are posted ahead: the widest window of those it spans."""
    low, high = sorted((channel.source, channel.target))
    return max(windows[low:high])


def sends_under_way(channel: Channel) -> int:
    """How many sends of `channel` may be under way: one more for each boundary it crosses besides.

    A pipeline runs that much further ahead of the far end of a skip connection. A bound that does
    not grow with it stops the pipeline, for good where stages 0 and 9 hold each other's sends.
    """
    return SENDS_UNDER_WAY + abs(channel.target - channel.source) - 1


_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def _around(
    program: Program,
    receives: dict[tuple[int, Flow], list[Channel]],
    sends: dict[tuple[int, Flow], list[Channel]],
    windows: Sequence[int],
) -> Program:
    """One rank's program with the transfers around each compute instruction."""
    num_microbatches = 1 + max((i.microbatch for i in program), default=-1)
    posts: list[Instruction] = []  # those ahead of everything, in the order of their WAITs
    body: list[Instruction] = []
    owed: dict[Instruction, None] = {}  # the FREE of each send under way, oldest first

    def free(instruction: Instruction) -> None:
        if instruction in owed:
            del owed[instruction]
            body.append(instruction)

    for compute in program:
        if compute.kind not in FLOWS:
            body.append(compute)
            continue
        flow, stage, k = FLOWS[compute.kind], compute.stage, compute.microbatch
        for channel in receives[stage, flow]:
            ahead = window(channel, windows)
            post = Instruction(Kind.POST, stage, k, flow, channel.source)
            if k < ahead:
                posts.append(post)
            body.append(post._replace(kind=Kind.WAIT))
            if k + ahead < num_microbatches:
                body.append(post._replace(microbatch=k + ahead))
        if flow is Flow.GRADIENT:
            # Outputs may be views of received tensors, whose buffers return to the pool after
            # this backward. The gradient it takes came from there, so these sends are over.
            for channel in sends[stage, Flow.ACTIVATION]:
                free(Instruction(Kind.FREE, stage, k, Flow.ACTIVATION, channel.target))
        body.append(compute)
        for channel in sends[stage, flow]:
            release = Instruction(Kind.FREE, stage, k, flow, channel.target)
            free(release._replace(microbatch=k - sends_under_way(channel)))
            body.append(release._replace(kind=Kind.SEND))
            owed[release] = None
    return (*posts, *body, *owed)


def _check(programs: Programs, edges: Sequence[Edge], windows: Sequence[int]) -> None:
    """Refuse what cannot be meant, so that the pass may trust its arguments."""
    seen: set[tuple[int, int]] = set()
    for edge in edges:
        if not 0 <= edge.source < edge.target < len(programs):
            raise ScheduleError(
                f"expected an edge to a later one of {len(programs)} stages, "
                f"found {edge.source} -> {edge.target}"
            )
        if edge[:2] in seen:
            raise ScheduleError(f"the edge {edge.source} -> {edge.target} is given twice")
        seen.add(edge[:2])
    if len(windows) != len(programs) - 1:
        raise ScheduleError(
            f"expected a window for each of {len(programs) - 1} boundaries, found {len(windows)}"
        )
    for boundary, ahead in enumerate(windows):
        if ahead < 1:
            raise ScheduleError(
                f"expected a window of at least 1 at boundary {boundary}|{boundary + 1}, "
                f"found {ahead}"
            )
    for program in programs:
        for instruction in program:
            if instruction.flow is not None or instruction.kind is Kind.REDUCE:
                raise ScheduleError(
                    f"expected compute instructions alone, found {instruction}: "
                    "these programs have their transfers already"
                )
