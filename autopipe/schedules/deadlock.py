"""The proof, before anything starts, that programs run to their end and swap no tensors.

First `schedules.validate` checks the rules that need no graph: each program is complete, and both
ends of a channel have the same order. Then the graph of waits (`schedules.event_graph`) is walked:
the walk comes to its end, or the instructions that are left wait for each other in a cycle. That
is the deadlock, and the error follows it in words.

A transport that buffers or completes early only removes edges from that graph. So the proof holds
for gloo, for NCCL with one communicator per channel, and for queues between threads. REDUCE and
STEP add no edges: sums wait for each other only in STEP, the last instruction of a rank. Under
ZeRO-2 and 3 replicas also wait for each other within a step, to scatter gradients and to gather
parameters; as they run equal programs, they do so in the same order.

Channels must not share a communicator. Receives are posted ahead, so of two transfers in opposite
directions each rank issues its receive before its send; on a shared lane, which runs them in that
order, both ranks wait for each other:

    rank 0   lane: POST_B0  SEND_F0        for B0 rank 1 has to run F0 ...
    rank 1   lane: POST_F0  SEND_B0        ... which is behind B0 on rank 0
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np

from autopipe.errors import ScheduleError
from autopipe.schedules.event_graph import CODES, NEVER, Delays, EventGraph, Walk, walk
from autopipe.schedules.instructions import Channel, Instruction, Kind, Programs, holders
from autopipe.schedules.validate import (
    Ints,
    check_alone,
    check_ends,
    check_sums,
    ends,
    orders,
    tables,
)

Lanes = Callable[[Channel], Hashable]
"""Which lane a channel is on: transfers of one lane start in the order in which a rank issues their
ends. For example `lambda channel: 0`, one communicator for everything."""


def check(
    programs: Programs, lanes: Lanes | None = None, placed: Sequence[int] | None = None
) -> None:
    """Refuse programs that cannot run to their end, whatever the transport.

    The time it takes is linear in the number of instructions: about a microsecond for each.

    Args:
        lanes: the lane of each channel; None: each channel is a lane of its own. A channel between
            stages on one rank needs no transport, and never shares a lane.
        placed: the rank of each stage, if a rank may have nothing to do; None: as `holders`.

    Raises:
        ScheduleError: one sentence that names ranks and instructions. An instruction stands twice,
            on two ranks or on the wrong side of another; a transfer has one end; two ends of a
            channel have different orders; or there is a deadlock:

                deadlock: rank 0 waits at 0WAIT_B0<1 for 1SEND_B0>0, which comes after 1WAIT_F1<0
                of rank 1; rank 1 waits at 1WAIT_F1<0 for 0SEND_F1>1, which comes after 0WAIT_B0<1
                of rank 0
    """
    run(graph(programs, lanes, placed), lanes=lanes)


def graph(
    programs: Programs, lanes: Lanes | None = None, placed: Sequence[int] | None = None
) -> EventGraph:
    """The graph of waits of programs that keep the rules.

    Args:
        lanes, placed: as of `check`.

    Raises:
        ScheduleError: as `check`, deadlock aside.
    """
    holder = holders(programs) if placed is None else placed
    program_tables, microbatches = tables(programs)
    for rank, (program, table) in enumerate(zip(programs, program_tables, strict=True)):
        check_alone(rank, program, table)
    check_sums(programs, program_tables)
    sends = orders(program_tables, Kind.SEND)
    check_ends(sends, orders(program_tables, Kind.POST), microbatches)

    by_column: dict[Channel, Ints] = {}  # the numbers of a channel's transfers
    transfers: list[tuple[int, int]] = []
    for index, (channel, order) in enumerate(sends.items()):
        by_column[channel] = np.zeros(len(microbatches), np.int64)
        by_column[channel][order] = len(transfers) + np.arange(len(order))
        transfers += [(index, k) for k in microbatches[order].tolist()]
    codes, numbers = [], []
    for table in program_tables:
        code = np.array([CODES[line[0]] for line in table.lines], np.int64)
        number = np.zeros(len(table.line), np.int64)
        for line, index in table.lines.items():
            if line[2] is not None:
                of_line = table.line == index
                channel = Instruction(line[0], line[1], 0, line[2], line[3]).channel
                number[of_line] = by_column[channel][table.column[of_line]]
        codes.append(code[table.line].tolist())
        numbers.append(number.tolist())
    events = EventGraph(programs, program_tables, holder, codes, numbers, tuple(sends), transfers)
    return replace(events, lanes=_shared(events, lanes)) if lanes else events


def _shared(graph: EventGraph, lanes: Lanes) -> list[tuple[int, int]]:
    """The pairs of transfers of which one directly follows the other on a lane of some rank."""
    found = []
    for program, numbers in zip(graph.programs, graph.numbers, strict=True):
        last: dict[Hashable, int] = {}
        for instruction, number in zip(program, numbers, strict=True):
            if _on_lane(graph, instruction):
                lane = lanes(instruction.channel)
                if lane in last:
                    found.append((last[lane], number))
                last[lane] = number
    return found


def _on_lane(graph: EventGraph, instruction: Instruction) -> bool:
    """Whether an instruction is an end of a transfer between two ranks."""
    if instruction.kind is not Kind.SEND and instruction.kind is not Kind.POST:
        return False
    source, target, _ = instruction.channel
    return graph.holder[source] != graph.holder[target]


def run(graph: EventGraph, delays: Delays | None = None, lanes: Lanes | None = None) -> Walk:
    """Walk through a graph, made with the same `lanes`, to the end of every program.

    Raises:
        ScheduleError: there is no way to the end: a deadlock.
    """
    found = walk(graph, delays)
    if all(map(operator.eq, map(len, found.ends), map(len, graph.programs))):
        return found
    raise ScheduleError(
        "deadlock: " + "; ".join(_cycle(graph, found, lanes)),
        hint="one of these must come earlier or later in its program, or a window be wider",
    )


_Transfer = tuple[Channel, int]


def _cycle(graph: EventGraph, walk: Walk, lanes: Lanes | None) -> list[str]:
    """The waits around the cycle in words, from its lowest rank.

    Each rank that is left (at a WAIT or a FREE) and each transfer that is left (in its lane) waits
    for another rank or transfer that is left. To follow these waits leads into a cycle.
    """
    at = {
        rank: program[len(done)]
        for rank, (program, done) in enumerate(zip(graph.programs, walk.ends, strict=True))
        if len(done) < len(program)
    }
    ahead = {rank: set(graph.programs[rank][len(walk.ends[rank]) :]) for rank in at}
    happened = {
        (graph.channels[channel], k)
        for (channel, k), time in zip(graph.transfers, walk.arrived, strict=True)
        if time != NEVER
    }

    def blame(waiting: int | _Transfer) -> tuple[int | _Transfer, Instruction, str]:
        """The rank or transfer that `waiting` waits for, the instruction, and where it stands."""
        if isinstance(waiting, int):
            channel, k = at[waiting].channel, at[waiting].microbatch
        else:
            channel, k = waiting
        for end in ends(channel, k):
            rank = graph.holder[end.stage]
            if end in ahead.get(rank, ()):
                later = (
                    f"after {at[rank]} of rank {rank}" if rank != waiting else "later on that rank"
                )
                return rank, end, f"which comes {later}"
        for end in ends(channel, k):  # both are issued, so the transfer is behind another
            rank = graph.holder[end.stage]
            program = graph.programs[rank]
            for prior in reversed(program[: program.index(end)]):
                if lanes and _on_lane(graph, prior) and lanes(prior.channel) == lanes(end.channel):
                    before = prior.channel, prior.microbatch
                    if before not in happened:
                        return before, prior, f"which is before {end} in a lane of rank {rank}"
        raise AssertionError(f"{channel} {k} has not happened and waits for nothing")

    path: list[int | _Transfer] = []
    waits: list[str] = []
    node: int | _Transfer = min(at)
    name: Instruction | None = None
    while node not in path:
        waiter = f"rank {node} waits at {at[node]}" if isinstance(node, int) else f"{name} waits"
        path.append(node)
        node, name, why = blame(node)
        waits.append(f"{waiter} for {name}, {why}")
    first = path.index(node)
    ranks = [other for other in path[first:] if isinstance(other, int)]
    start = path.index(min(ranks)) if ranks else first
    return waits[start:] + waits[first:start]
