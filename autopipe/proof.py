"""The proof, before anything starts, that programs run to their end and swap no tensors.

The model is the strictest transport there is: a transfer is ONE event that happens when both ends
are ready for it and the transfer before it on its channel is over. Nothing is buffered.

    SEND at the source --+                +--> WAIT at the target
                         +--> transfer ---+
    POST at the target --+       |        +--> FREE at the source
                                 v
                     the channel's next transfer

With the order of each program this is a graph in which everything waits for ALL its predecessors.
Such a graph can be run in any order that its edges allow and always gets equally far, so running
it once, without time, is the proof: it ends, or what is left holds a cycle, which is the deadlock.
A transport that buffers or completes early only takes edges away, hence the proof holds for gloo,
for NCCL with one communicator per channel, and for queues between threads.

Before that, each program alone and the two ends of each channel are held against the rules that the
graph takes for granted; `_neighbours` lists them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

from autopipe.errors import ScheduleError
from autopipe.schedule import Channel, Flow, Instruction, Kind, Program, Programs


def check(programs: Programs) -> None:
    """Refuse programs that cannot run to their end, whatever the transport.

    The time it takes is linear in the number of instructions.

    Raises:
        ScheduleError: one sentence that names ranks and instructions. One stands twice, on two
            ranks or on the wrong side of another; a transfer has one end; two ends of a channel
            are in different orders; or there is a deadlock, and its circle is followed:

                deadlock: rank 0 waits at 0WAIT_B0<1 for 1SEND_B0>0, which comes after 1WAIT_F1<0
                of rank 1; rank 1 waits at 1WAIT_F1<0 for 0SEND_F1>1, which comes after 0WAIT_B0<1
                of rank 0
    """
    holder: dict[int, int] = {}
    for rank, program in enumerate(programs):
        for stage in {instruction.stage for instruction in program}:
            if holder.setdefault(stage, rank) != rank:
                raise ScheduleError(f"stage {stage} stands on ranks {holder[stage]} and {rank}")
    for rank, program in enumerate(programs):
        _check_alone(rank, program)
    sends, posts = _orders(programs, Kind.SEND), _orders(programs, Kind.POST)
    for channel in dict.fromkeys((*sends, *posts)):
        _check_ends(channel, sends[channel], posts[channel])
    _run(programs, sends, holder)


def _check_alone(rank: int, program: Program) -> None:
    """Hold one program against the rules that need no other."""
    place = {instruction: position for position, instruction in enumerate(program)}
    for position, instruction in enumerate(program):
        if place[instruction] != position:
            raise ScheduleError(f"rank {rank}: {instruction} stands twice")
        if instruction.kind is Kind.REDUCE and position + 1 < len(program):
            raise ScheduleError(
                f"rank {rank}: {program[position + 1]} stands after {instruction}, which ends a "
                "program: all ranks meet there"
            )
        before, after = _neighbours(instruction, place)
        if before is not None and place.get(before, len(program)) > position:
            found = "stands after it" if before in place else "is missing"
            raise ScheduleError(
                f"rank {rank}: {instruction} needs {before} before it, which {found}"
            )
        if after is not None and place.get(after, -1) < position:
            found = "stands before it" if after in place else "is missing"
            raise ScheduleError(f"rank {rank}: {instruction} needs {after} after it, which {found}")


def _neighbours(
    instruction: Instruction, place: Container[Instruction]
) -> tuple[Instruction | None, Instruction | None]:
    """What must stand before an instruction in its own program, and what after it.

    The chains that every program is woven from, with I for B where backward is split:

        POST_F WAIT_F F SEND_F FREE_F B        POST_B WAIT_B B SEND_B FREE_B        F B    F I W

    A forward's sends are freed before its backward, which lets go of what they may view.
    """
    kind, stage, k, flow, peer = instruction
    if flow is None:
        if kind is Kind.FORWARD or kind is Kind.REDUCE:
            return None, None
        made = Kind.BACKWARD_INPUT if kind is Kind.BACKWARD_WEIGHT else Kind.FORWARD
        return Instruction(made, stage, k), None
    if kind is Kind.POST:
        return None, Instruction(Kind.WAIT, stage, k, flow, peer)
    compute = Instruction(Kind.FORWARD, stage, k)
    if flow is Flow.GRADIENT or kind is Kind.FREE:
        compute = Instruction(Kind.BACKWARD_INPUT, stage, k)
        if compute not in place:
            compute = Instruction(Kind.BACKWARD, stage, k)
    if kind is Kind.WAIT:
        return Instruction(Kind.POST, stage, k, flow, peer), compute
    if kind is Kind.SEND:
        return compute, Instruction(Kind.FREE, stage, k, flow, peer)
    lets_go = flow is Flow.ACTIVATION and compute in place
    return Instruction(Kind.SEND, stage, k, flow, peer), compute if lets_go else None


def _orders(programs: Programs, kind: Kind) -> defaultdict[Channel, dict[int, int]]:
    """The order in which one end of each channel, the SENDs or the POSTs, issues its transfers."""
    orders: defaultdict[Channel, dict[int, int]] = defaultdict(dict)
    for program in programs:
        for instruction in program:
            if instruction.kind is kind:
                order = orders[instruction.channel]
                order[instruction.microbatch] = len(order)
    return orders


def _check_ends(channel: Channel, sends: dict[int, int], posts: dict[int, int]) -> None:
    """Refuse a transfer with one end, and ends that pair the wrong tensors."""
    send = Instruction(Kind.SEND, channel.source, 0, channel.flow, channel.target)
    post = Instruction(Kind.POST, channel.target, 0, channel.flow, channel.source)
    for one, other, unpaired in (
        (send, post, sends.keys() - posts.keys()),
        (post, send, posts.keys() - sends.keys()),
    ):
        if unpaired:
            one, other = (end._replace(microbatch=min(unpaired)) for end in (one, other))
            raise ScheduleError(f"{one} has no {other}: a transfer needs both ends")
    for number, (sent, posted) in enumerate(zip(sends, posts, strict=True)):
        if sent != posted:
            one, other = send._replace(microbatch=sent), post._replace(microbatch=posted)
            raise ScheduleError(
                f"transfer {number} from stage {channel.source} to stage {channel.target} is "
                f"{one} at the source and {other} at the target: tensors would be swapped"
            )


def _run(programs: Programs, orders: dict[Channel, dict[int, int]], holder: dict[int, int]) -> None:
    """Run every program as far as it goes; refuse if that is not to the end.

    Both ends issue the transfers of a channel in the same order, so transfer number n is over as
    soon as more than n have been sent and more than n posted: two counters hold a channel's state.
    """
    sent = dict.fromkeys(orders, 0)
    posted = dict.fromkeys(orders, 0)
    position = [0] * len(programs)
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        program = programs[rank]
        while position[rank] < len(program):
            instruction = program[position[rank]]
            if instruction.flow is not None:
                channel = instruction.channel
                if instruction.kind is Kind.SEND:
                    sent[channel] += 1
                    ready.append(holder[channel.target])
                elif instruction.kind is Kind.POST:
                    posted[channel] += 1
                    ready.append(holder[channel.source])
                else:
                    number = orders[channel][instruction.microbatch]
                    if sent[channel] <= number or posted[channel] <= number:
                        break
            position[rank] += 1

    stuck = {r: p[position[r]] for r, p in enumerate(programs) if position[r] < len(p)}
    if not stuck:
        return
    missing = {}
    for rank, instruction in stuck.items():
        channel, k = instruction.channel, instruction.microbatch
        missing[rank] = (
            Instruction(Kind.SEND, channel.source, k, channel.flow, channel.target)
            if sent[channel] <= orders[channel][k]
            else Instruction(Kind.POST, channel.target, k, channel.flow, channel.source)
        )
    raise ScheduleError(
        "deadlock: " + "; ".join(_circle(stuck, missing, holder)),
        hint="one of these must stand earlier or later in its program, or a window be wider",
    )


def _circle(
    stuck: dict[int, Instruction], missing: dict[int, Instruction], holder: dict[int, int]
) -> list[str]:
    """Who waits for whom around the circle, from its lowest rank.

    Every rank that is left waits for an instruction that another rank has ahead of it: following
    them from anywhere comes back to a rank already met.
    """
    path: list[int] = []
    rank = min(stuck)
    while rank not in path:
        path.append(rank)
        rank = holder[missing[rank].stage]
    circle = path[path.index(rank) :]
    start = circle.index(min(circle))
    return [
        f"rank {rank} waits at {stuck[rank]} for {missing[rank]}, which comes after "
        f"{stuck[holder[missing[rank].stage]]} of rank {holder[missing[rank].stage]}"
        for rank in circle[start:] + circle[:start]
    ]
