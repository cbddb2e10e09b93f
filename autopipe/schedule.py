"""Who computes what when: a schedule is data, one program of instructions per rank.

    rank 0: 0F0 0F1 0B0 0B1      stage 0: forward of micro-batches 0 and 1, then backward of both
    rank 1: 1F0 1B0 1F1 1B1

Generators are pure functions of (number of stages, number of micro-batches) and write compute
alone; `autopipe.transfers` adds what moves tensors, `autopipe.proof` shows that the whole can run.
Each instruction names its stage; here rank r holds stage r.

Both schedules run the backwards of a stage in the order of the micro-batches. Gradients are sums
of floats, so the order is part of the result: every schedule, and one process that takes the
micro-batches in turn, gives the same bits.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopipe.errors import ScheduleError


class Kind(enum.Enum):
    """What an instruction does, in pseudo-code for micro-batch k."""

    FORWARD = "F"  # outputs[k] = stage(inputs[k])
    BACKWARD = "B"  # I and W together: d_inputs[k], d_parameters += vjp(outputs[k], d_outputs[k])
    BACKWARD_INPUT = "I"  # d_inputs[k] = the part of B that the stage before waits for
    BACKWARD_WEIGHT = "W"  # d_parameters += the rest of B
    POST = "POST"  # receiving[k] = irecv(pool.take(), peer)
    WAIT = "WAIT"  # inputs[k] (or d_outputs[k]) = receiving.pop(k).wait()
    SEND = "SEND"  # sending[k] = isend(outputs[k] (or d_inputs[k]), peer)
    FREE = "FREE"  # sending.pop(k).wait(), and nobody holds its tensors any longer
    REDUCE = "REDUCE"  # d_parameters = sum over data-parallel ranks and tied copies

    __hash__ = object.__hash__  # members are single objects; Enum's own hash runs in Python


class Flow(enum.Enum):
    """What a transfer carries: activations to a later stage, or their gradients back."""

    ACTIVATION = "F"
    GRADIENT = "B"
    __hash__ = object.__hash__


FLOWS = {
    Kind.FORWARD: Flow.ACTIVATION,
    Kind.BACKWARD: Flow.GRADIENT,
    Kind.BACKWARD_INPUT: Flow.GRADIENT,
}
"""What a compute instruction takes from its neighbours on one side and makes for the other."""

_RECEIVING = (Kind.POST, Kind.WAIT)  # these name the source as their peer, the others the target


class Channel(NamedTuple):
    """One direction between two stages: transfers on it happen in the order they are issued."""

    source: int
    target: int
    flow: Flow


class Instruction(NamedTuple):
    """One line of a program; `flow` and `peer` (the other stage) are there for transfers only."""

    kind: Kind
    stage: int
    microbatch: int = 0
    flow: Flow | None = None
    peer: int | None = None

    def __str__(self) -> str:
        """The text form: `0F3`, `1POST_F3<0`, `0SEND_F3>1`, `0REDUCE`; `parse` reads it back."""
        if self.kind is Kind.REDUCE:
            return f"{self.stage}REDUCE"
        if self.flow is None:
            return f"{self.stage}{self.kind.value}{self.microbatch}"
        arrow = "<" if self.kind in _RECEIVING else ">"
        what = f"{self.kind.value}_{self.flow.value}{self.microbatch}"
        return f"{self.stage}{what}{arrow}{self.peer}"

    @property
    def channel(self) -> Channel:
        """The channel of a transfer.

        Raises:
            ScheduleError: the instruction moves nothing between stages.
        """
        if self.flow is None or self.peer is None:
            raise ScheduleError(f"{self} is no transfer and has no channel")
        if self.kind in _RECEIVING:
            return Channel(self.peer, self.stage, self.flow)
        return Channel(self.stage, self.peer, self.flow)


Program = tuple[Instruction, ...]
Programs = tuple[Program, ...]

_TOKEN = re.compile(
    r"(?P<stage>\d+)"
    r"(?:(?P<compute>[FBIW])(?P<microbatch>\d+)"
    r"|(?P<transfer>POST|WAIT|SEND|FREE)_(?P<flow>[FB])(?P<moved>\d+)[<>](?P<peer>\d+)"
    r"|REDUCE)"
)


def parse(text: str) -> Instruction:
    """Read one instruction back from its text form.

    Raises:
        ScheduleError: `text` is not what an instruction prints as.
    """
    found = _TOKEN.fullmatch(text)
    if found is not None:
        stage = int(found["stage"])
        if found["compute"]:
            instruction = Instruction(Kind(found["compute"]), stage, int(found["microbatch"]))
        elif found["transfer"]:
            kind, flow = Kind(found["transfer"]), Flow(found["flow"])
            instruction = Instruction(kind, stage, int(found["moved"]), flow, int(found["peer"]))
        else:
            instruction = Instruction(Kind.REDUCE, stage)
        # Refuses a leading zero and an arrow that points the wrong way.
        if str(instruction) == text:
            return instruction
    raise ScheduleError(
        f"expected an instruction, found {text!r}",
        hint="instructions look like 0F3, 1B3, 1POST_F3<0, 1WAIT_F3<0, 0SEND_F3>1, 0REDUCE",
    )


def format_programs(programs: Programs) -> str:
    """One line per rank, `rank 0: 0F0 0F1 ...`; `parse_programs` reads it back."""
    return "\n".join(
        f"rank {rank}: {' '.join(map(str, program))}".rstrip()
        for rank, program in enumerate(programs)
    )


def parse_programs(text: str) -> Programs:
    """Read programs back from `format_programs`; blank lines and indentation do not matter.

    Raises:
        ScheduleError: a line is not `rank R: ...` with R counting from 0, or a token is bad.
    """
    programs: list[Program] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        head, colon, tokens = line.partition(":")
        if not colon or head != f"rank {len(programs)}":
            raise ScheduleError(f"expected a line `rank {len(programs)}: ...`, found {line!r}")
        programs.append(tuple(map(parse, tokens.split())))
    return tuple(programs)


def gpipe(num_stages: int, num_microbatches: int) -> Programs:
    """All forwards, then all backwards: simple, and holds every micro-batch's activations.

    Three stages, four micro-batches, a backward as long as two forwards:

        rank 0: F0 F1 F2 F3                   B0--- B1--- B2--- B3---
        rank 1:    F0 F1 F2 F3          B0--- B1--- B2--- B3---
        rank 2:       F0 F1 F2 F3 B0--- B1--- B2--- B3---

    From "GPipe" (Huang et al., 2019, arXiv:1811.06965), with the backwards in the order of the
    micro-batches instead of the reverse.

    Raises:
        ScheduleError: there is no stage or no micro-batch.
    """
    _at_least_one(num_stages, num_microbatches)
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return tuple(
        tuple(Instruction(kind, stage, k) for kind in kinds for k in range(num_microbatches))
        for stage in range(num_stages)
    )


def one_f_one_b(num_stages: int, num_microbatches: int) -> Programs:
    """As long a line of forwards as reaches the last stage, then one backward for each forward.

    Three stages, five micro-batches, a backward as long as two forwards:

        rank 0: F0 F1 F2             B0--- F3 B1--- F4 B2---    B3---    B4---
        rank 1:    F0 F1       B0--- F2 B1--- F3 B2--- F4 B3---    B4---
        rank 2:       F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4---

    As long as GPipe, but stage i of p holds the activations of p - i micro-batches, however many
    there are. From PipeDream-Flush (Narayanan et al., 2021, arXiv:2006.09503).

    Raises:
        ScheduleError: there is no stage or no micro-batch.
    """
    _at_least_one(num_stages, num_microbatches)
    programs = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, num_microbatches)
        program = []
        for k in range(ahead):  # warm-up
            program.append(Instruction(Kind.FORWARD, stage, k))
        for k in range(num_microbatches - ahead):  # steady
            program.append(Instruction(Kind.FORWARD, stage, k + ahead))
            program.append(Instruction(Kind.BACKWARD, stage, k))
        for k in range(num_microbatches - ahead, num_microbatches):  # cool-down
            program.append(Instruction(Kind.BACKWARD, stage, k))
        programs.append(tuple(program))
    return tuple(programs)


def forward_only(num_stages: int, num_microbatches: int) -> Programs:
    """Evaluation: every stage runs the forwards in turn and keeps nothing.

    Raises:
        ScheduleError: there is no stage or no micro-batch.
    """
    _at_least_one(num_stages, num_microbatches)
    return tuple(
        tuple(Instruction(Kind.FORWARD, stage, k) for k in range(num_microbatches))
        for stage in range(num_stages)
    )


def _at_least_one(num_stages: int, num_microbatches: int) -> None:
    for count, name in ((num_stages, "stage"), (num_microbatches, "micro-batch")):
        if count < 1:
            raise ScheduleError(f"a schedule needs at least 1 {name}, found {count}")


SCHEDULES: dict[str, Callable[[int, int], Programs]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""The training schedules by the name a plan gives them."""

_IN_FLIGHT: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda p, m, i: m,
    "1f1b": lambda p, m, i: min(m, p - i),
}


def in_flight(name: str, num_stages: int, num_microbatches: int, stage: int) -> int:
    """The most micro-batches whose activations `stage` holds at once under schedule `name`.

    Raises:
        ScheduleError: there is no schedule of that name.
    """
    if name not in _IN_FLIGHT:
        raise ScheduleError(
            f"there is no schedule {name!r}", hint=f"the schedules are {', '.join(SCHEDULES)}"
        )
    return _IN_FLIGHT[name](num_stages, num_microbatches, stage)


class Span(NamedTuple):
    """A compute instruction at its place in time; seconds from the start of the step."""

    rank: int
    instruction: Instruction
    start: float
    end: float


def timeline(
    programs: Programs,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
) -> list[Span]:
    """When each compute instruction runs, rank by rank, if transfers take no time.

    That is the longest path to it: forward k of a stage follows forward k of the stage before,
    backward k follows backward k of the stage after, and a rank does one thing at a time in
    program order. Transfers are passed over.

    Args:
        forward, backward: seconds of one micro-batch, the same for all stages or one per stage.
            Backward for inputs and backward for weights take half of `backward` each.

    Raises:
        ScheduleError: the programs wait for each other, or a forward or backward is missing.
    """
    seconds = {
        Kind.FORWARD: _per_stage(forward, len(programs)),
        Kind.BACKWARD: _per_stage(backward, len(programs)),
    }
    halves = [time / 2 for time in seconds[Kind.BACKWARD]]
    seconds[Kind.BACKWARD_INPUT] = seconds[Kind.BACKWARD_WEIGHT] = halves
    computes = [[i for i in program if i.kind in seconds] for program in programs]
    rows: list[list[Span]] = [[] for _ in programs]
    ends: dict[tuple[Flow, int, int], float] = {}  # of F, and of B or I

    moved = True
    while moved:
        moved = False
        for rank, (program, row) in enumerate(zip(computes, rows, strict=True)):
            while len(row) < len(program):
                instruction = program[len(row)]
                needs = _needs(instruction, len(programs))
                if any(need not in ends for need in needs):
                    break
                start = max([row[-1].end if row else 0.0, *(ends[need] for need in needs)])
                end = start + seconds[instruction.kind][instruction.stage]
                row.append(Span(rank, instruction, start, end))
                if instruction.kind in FLOWS:
                    ends[FLOWS[instruction.kind], instruction.stage, instruction.microbatch] = end
                moved = True

    for rank, (program, row) in enumerate(zip(computes, rows, strict=True)):
        if len(row) < len(program):
            stuck = program[len(row)]
            flow, stage, k = next(n for n in _needs(stuck, len(programs)) if n not in ends)
            missing = f"{stage}{flow.value}{k}"
            raise ScheduleError(f"rank {rank} waits at {stuck} for {missing}, which never runs")
    return [span for row in rows for span in row]


def _needs(instruction: Instruction, num_stages: int) -> list[tuple[Flow, int, int]]:
    """What must have run before a compute instruction may, besides the rank's own program."""
    kind, stage, k = instruction.kind, instruction.stage, instruction.microbatch
    if kind is Kind.FORWARD:
        return [(Flow.ACTIVATION, stage - 1, k)] if stage > 0 else []
    if kind is Kind.BACKWARD_WEIGHT:
        return [(Flow.GRADIENT, stage, k)]
    after = [(Flow.GRADIENT, stage + 1, k)] if stage + 1 < num_stages else []
    return [(Flow.ACTIVATION, stage, k), *after]


def _per_stage(seconds: float | Sequence[float], num_stages: int) -> Sequence[float]:
    return seconds if isinstance(seconds, Sequence) else [seconds] * num_stages


def draw(
    programs: Programs,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    unit: float = 1.0,
) -> str:
    """The picture of `timeline`: a row per rank, a column of one label's width per `unit` seconds.

    Raises:
        ScheduleError: as `timeline`.
    """
    spans = timeline(programs, forward, backward)
    labels = [f"{span.instruction.kind.value}{span.instruction.microbatch}" for span in spans]
    cell = 1 + max(map(len, labels), default=0)
    rows = [""] * len(programs)
    for span, label in zip(spans, labels, strict=True):
        start, end = (round(time / unit * cell) for time in (span.start, span.end))
        room = max(1, end - start - 1)
        rows[span.rank] = f"{rows[span.rank].ljust(start)}{label.ljust(room, '-')[:room]} "
    return "\n".join(f"rank {rank}: {row}".rstrip() for rank, row in enumerate(rows))
