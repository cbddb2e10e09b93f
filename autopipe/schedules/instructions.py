"""Who computes what when: a schedule is data, one program of instructions per rank.

    rank 0: 0F0 0F1 0B0 0B1      stage 0: forward of micro-batches 0 and 1, then backward of both
    rank 1: 1F0 1B0 1F1 1B1

This module has the instructions and their text form. `schedules.generators` generates compute
alone, `schedules.transfers` adds transfers, `schedules.deadlock` proves that programs can run.

Each instruction names its stage, counted along the model from 0. A rank may hold several stages;
only its program tells which ones (`holders`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
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
    REDUCE = "REDUCE"  # from here on: d_parameters = sum over data-parallel ranks, tied copies
    STEP = "STEP"  # wait for the sums of all stages of the rank: its gradients are ready

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

COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
"""The instructions that keep a device busy."""

FINAL = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
"""The instructions that add to parameters' gradients, which are final after a stage's last one."""

_RECEIVING = (Kind.POST, Kind.WAIT)  # these name the source as their peer, the others the target
_WHOLE = (Kind.REDUCE, Kind.STEP)  # these are of all micro-batches together


class Channel(NamedTuple):
    """One direction between two stages; its transfers happen in the order of their issue."""

    source: int
    target: int
    flow: Flow


class Instruction(NamedTuple):
    """One step of a program; only transfers have a `flow` and a `peer`, the other stage."""

    kind: Kind
    stage: int
    microbatch: int = 0
    flow: Flow | None = None
    peer: int | None = None

    def __str__(self) -> str:
        """The text form: `0F3`, `1POST_F3<0`, `0SEND_F3>1`, `0REDUCE`; `parse` reads it back."""
        if self.kind in _WHOLE:
            return f"{self.stage}{self.kind.value}"
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
    r"|(?P<whole>REDUCE|STEP))"
)


def parse(text: str) -> Instruction:
    """Read one instruction back from its text form.

    Raises:
        ScheduleError: `text` is not the text of an instruction.
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
            instruction = Instruction(Kind(found["whole"]), stage)
        # Refuses a leading zero and an arrow that points the wrong way.
        if str(instruction) == text:
            return instruction
    raise ScheduleError(
        f"expected an instruction, found {text!r}",
        hint="instructions look like 0F3, 1B3, 1POST_F3<0, 1WAIT_F3<0, 0SEND_F3>1, 0REDUCE, 0STEP",
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
        try:
            programs.append(tuple(map(parse, tokens.split())))
        except ScheduleError as error:
            raise ScheduleError(f"{head}: {error.message}", hint=error.hint) from None
    return tuple(programs)


def stages_of(program: Program) -> tuple[int, ...]:
    """The stages of a rank, ascending."""
    return tuple(sorted({instruction.stage for instruction in program}))


def holders(programs: Programs) -> tuple[int, ...]:
    """The rank of each stage, as the programs have it.

    Raises:
        ScheduleError: the stages are not 0, 1, 2, ... with each on one rank.
    """
    ranks: dict[int, int] = {}
    for rank, program in enumerate(programs):
        for stage in stages_of(program):
            if ranks.setdefault(stage, rank) != rank:
                raise ScheduleError(f"stage {stage} is on ranks {ranks[stage]} and {rank}")
    for stage in range(max(ranks, default=-1)):
        if stage not in ranks:
            raise ScheduleError(f"stage {stage} is on no rank, and stage {max(ranks)} does")
    return tuple(ranks[stage] for stage in sorted(ranks))


class Entries(NamedTuple):
    """The stage of each entry of the programs, and the micro-batches that the entry takes: those
    whose number divided by `of` leaves `own`."""

    stages: tuple[int, ...]
    own: tuple[int, ...]
    of: tuple[int, ...]

    @staticmethod
    def at(turns: Sequence[int]) -> Entries:
        """The entries of stages that have this number of entries each."""
        found = [(stage, i, n) for stage, n in enumerate(turns) for i in range(n)]
        return Entries(*zip(*found, strict=True)) if found else Entries((), (), ())

    def taken(self, entry: int, microbatches: Sequence[int]) -> Sequence[int]:
        """The micro-batches, out of those given, that an entry takes."""
        of = self.of[entry]
        if of == 1:
            return microbatches
        return [k for k in microbatches if k % of == self.own[entry]]


def splits(programs: Programs) -> bool:
    """Whether some backward is in two halves, I and W."""
    return any(i.kind is Kind.BACKWARD_WEIGHT for program in programs for i in program)
