"""Checks the rules that programs must keep before `schedules.deadlock` looks at their waits alone.

Each program by itself: every instruction stands once, after those it needs and before those that
need it,

    POST_F WAIT_F F SEND_F FREE_F B        POST_B WAIT_B B SEND_B FREE_B        F B    F I W

with I for B if backward is split. A forward's sends are freed before its backward, which frees the
memory that they may view. REDUCE stands right before the last B or W of its stage, STEP at the end.

All programs together: a stage is on one rank, and both ends of a channel issue the same transfers
in the same order, as a channel has no tags. WAITs may come in another order: they name their
micro-batch.

A loop in Python over half a million instructions would be slow. So a program becomes a table of its
instructions' positions, with a row for each *line* (an instruction without its micro-batch) and a
column for each micro-batch; a rule compares one row with another:

    micro-batch     0   1   2   3
    1F              1   4   8  12
    1SEND_F>2       2   6  10  13        every number larger than the one above it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from autopipe.errors import ScheduleError
from autopipe.schedules.instructions import (
    COMPUTE,
    FINAL,
    Channel,
    Flow,
    Instruction,
    Kind,
    Program,
    Programs,
)

Ints = NDArray[np.int64]
Line = tuple[Kind, int, Flow | None, int | None]  # an instruction without its micro-batch
Orders = Mapping[Channel, Ints]


@dataclass(frozen=True, eq=False)
class ProgramTable:
    """A program as arrays.

    Args:
        lines: the number of each line, from 0.
        line, column: of the instruction at each position, its line and its micro-batch's column.
        place: the position of the instruction in each line and column; -1 where there is none.
    """

    lines: Mapping[Line, int]
    line: Ints
    column: Ints
    place: Ints


def tables(programs: Programs) -> tuple[list[ProgramTable], Ints]:
    """A table for each program, and the micro-batches of the columns, which all of them share."""
    columns: dict[int, int] = defaultdict(count().__next__)
    found = []
    for program in programs:
        lines: dict[Line, int] = defaultdict(count().__next__)
        kinds, stages, microbatches, flows, peers = (
            zip(*program, strict=True) if program else [()] * 5
        )
        line = list(map(lines.__getitem__, zip(kinds, stages, flows, peers, strict=True)))
        column = list(map(columns.__getitem__, microbatches))
        found.append((dict(lines), np.array(line, np.int64), np.array(column, np.int64)))
    made = []
    for numbers, line_of, column_of in found:
        place = np.full((len(numbers), len(columns)), -1)
        place[line_of, column_of] = np.arange(len(line_of))
        made.append(ProgramTable(numbers, line_of, column_of, place))
    return made, np.array(list(columns), np.int64)


def check_alone(rank: int, program: Program, table: ProgramTable) -> None:
    """Check one program by the rules that need no other program; reports the first broken rule.

    Raises:
        ScheduleError: `rank 1: 1FREE_B0>0 needs 1SEND_B0>0 before it, which is missing`.
    """
    breaks: list[tuple[int, str]] = []  # where, and what to say
    twice = np.flatnonzero(table.place[table.line, table.column] != np.arange(len(program)))
    breaks += [(int(position), f"{program[position]} appears twice") for position in twice[:1]]
    for line, number in table.lines.items():
        kind, _, flow, _ = line
        if kind is Kind.REDUCE or kind is Kind.STEP:
            breaks += _check_last(program, int(table.place[number].max()))
        before, after = _NEIGHBOURS.get((kind, flow), ((), ()))
        breaks += _check_side(program, table, line, before, "before")
        breaks += _check_side(program, table, line, after, "after")
    if breaks:
        _, sentence = min(breaks, key=lambda found: found[0])
        raise ScheduleError(f"rank {rank}: {sentence}")


_B = (Kind.BACKWARD_INPUT, Kind.BACKWARD)  # the one that a micro-batch has

_NEIGHBOURS: dict[tuple[Kind, Flow | None], tuple[tuple[Kind, ...], tuple[Kind, ...]]] = {
    (Kind.FORWARD, None): ((), _B),
    (Kind.BACKWARD, None): ((Kind.FORWARD,), ()),
    (Kind.BACKWARD_INPUT, None): ((Kind.FORWARD,), (Kind.BACKWARD_WEIGHT,)),
    (Kind.BACKWARD_WEIGHT, None): ((Kind.BACKWARD_INPUT,), ()),
    (Kind.POST, Flow.ACTIVATION): ((), (Kind.WAIT,)),
    (Kind.WAIT, Flow.ACTIVATION): ((Kind.POST,), (Kind.FORWARD,)),
    (Kind.SEND, Flow.ACTIVATION): ((Kind.FORWARD,), (Kind.FREE,)),
    (Kind.FREE, Flow.ACTIVATION): ((Kind.SEND,), _B),
    (Kind.POST, Flow.GRADIENT): ((), (Kind.WAIT,)),
    (Kind.WAIT, Flow.GRADIENT): ((Kind.POST,), _B),
    (Kind.SEND, Flow.GRADIENT): (_B, (Kind.FREE,)),
    (Kind.FREE, Flow.GRADIENT): ((Kind.SEND,), ()),
}
"""The instructions before and after an instruction, of its stage, peer and micro-batch."""


def _check_side(
    program: Program, table: ProgramTable, line: Line, kinds: Sequence[Kind], side: str
) -> Iterator[tuple[int, str]]:
    """The first instruction of a line whose neighbour is missing or on its wrong side."""
    if not kinds:
        return
    kind, stage, flow, peer = line
    positions = table.place[table.lines[line]]
    neighbours = np.full_like(positions, -1)
    for neighbour in kinds:
        number = table.lines.get(
            (neighbour, stage, *((None, None) if neighbour in COMPUTE else (flow, peer)))
        )
        if number is not None:
            neighbours = np.where(neighbours < 0, table.place[number], neighbours)
    missing = neighbours < 0
    swapped = ~missing & (
        (neighbours > positions) if side == "before" else (neighbours < positions)
    )
    if side == "after" and kind in (Kind.FORWARD, Kind.FREE):
        # Without sums of gradients, as in an evaluation, a backward may be missing.
        missing &= (Kind.REDUCE, stage, None, None) in table.lines
    wrong = np.flatnonzero((positions >= 0) & (missing | swapped))
    if not len(wrong):
        return
    column = min(wrong, key=positions.__getitem__)
    position, instruction = int(positions[column]), program[positions[column]]
    if missing[column]:
        need = instruction._replace(kind=kinds[-1])
        if need.kind in COMPUTE:
            need = need._replace(flow=None, peer=None)
        yield position, f"{instruction} needs {need} {side} it, which is missing"
    else:
        actual = "after" if side == "before" else "before"
        need = program[neighbours[column]]
        yield position, f"{instruction} needs {need} {side} it, which stands {actual} it"


def _check_last(program: Program, position: int) -> Iterator[tuple[int, str]]:
    """REDUCE stands right before the last backward of its stage, STEP at the end of a program."""
    instruction, rest = program[position], program[position + 1 :]
    stage = instruction.stage
    if instruction.kind is Kind.STEP:
        if rest:
            yield position, f"{rest[0]} stands after {instruction}, which ends a program"
        return
    finals = [later for later in rest if later.stage == stage and later.kind in FINAL]
    if not finals:
        yield position, f"{instruction} needs the last backward of stage {stage} after it"
    elif len(finals) > 1:
        yield position, f"{instruction} stands before {finals[0]}, and {finals[-1]} is the last"
    elif rest[0] != finals[0]:
        yield position, f"{instruction} must stand right before {finals[0]}, found {rest[0]}"


def check_sums(programs: Programs, made: Sequence[ProgramTable]) -> None:
    """If there is a REDUCE or STEP, each stage with backwards has a REDUCE, and its rank a STEP.

    Raises:
        ScheduleError: `rank 0: 0REDUCE is missing, and other stages have theirs`.
    """
    if not any(line[0] in (Kind.REDUCE, Kind.STEP) for table in made for line in table.lines):
        return
    for rank, table in enumerate(made):
        backward = {line[1] for line in table.lines if line[0] in FINAL}
        summed = {line[1] for line in table.lines if line[0] is Kind.REDUCE}
        for stage in sorted(backward - summed):
            missing = Instruction(Kind.REDUCE, stage)
            raise ScheduleError(f"rank {rank}: {missing} is missing, and other stages have theirs")
        if backward and programs[rank][-1].kind is not Kind.STEP:
            missing = Instruction(Kind.STEP, min(backward))
            raise ScheduleError(f"rank {rank}: {missing} is missing: nobody waits for the sums")


def orders(made: Sequence[ProgramTable], kind: Kind) -> Orders:
    """For each channel the order of its SENDs or of its POSTs, as columns of micro-batches."""
    return {
        Instruction(kind, line[1], 0, line[2], line[3]).channel: table.column[table.line == number]
        for table in made
        for line, number in table.lines.items()
        if line[0] is kind
    }


def check_ends(sends: Orders, posts: Orders, microbatches: Ints) -> None:
    """Refuse transfers with one end, and channels whose ends have different orders.

    Raises:
        ScheduleError: `0SEND_F1>1 has no 1POST_F1<0: a transfer needs both ends`.
    """
    for channel in dict.fromkeys((*sends, *posts)):
        sent, posted = (
            microbatches[orders[channel]].tolist() if channel in orders else []
            for orders in (sends, posts)
        )
        if sent == posted:
            continue
        send, post = ends(channel)
        for one, other, unpaired in (
            (send, post, set(sent) - set(posted)),
            (post, send, set(posted) - set(sent)),
        ):
            if unpaired:
                one, other = (end._replace(microbatch=min(unpaired)) for end in (one, other))
                raise ScheduleError(f"{one} has no {other}: a transfer needs both ends")
        number = next(n for n, k in enumerate(sent) if k != posted[n])
        one, other = ends(channel, sent[number])[0], ends(channel, posted[number])[1]
        raise ScheduleError(
            f"transfer {number} from stage {channel.source} to stage {channel.target} is "
            f"{one} at the source and {other} at the target: tensors would be swapped"
        )


def ends(channel: Channel, k: int = 0) -> tuple[Instruction, Instruction]:
    """The SEND and the POST of a channel's transfer of micro-batch `k`."""
    source, target, flow = channel
    send = Instruction(Kind.SEND, source, k, flow, target)
    return send, Instruction(Kind.POST, target, k, flow, source)
