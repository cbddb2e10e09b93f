"""Reads schedules that a user has written: text -> programs of compute, or a `ScheduleError`."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.errors import ScheduleError
from autopipe.schedules.instructions import (
    Entries,
    Instruction,
    Kind,
    Program,
    Programs,
    holders,
    parse_programs,
)


def parse(text: str, turns: Sequence[int] = ()) -> Programs:
    """A schedule that a user has written: compute alone, a line `rank R: ...` for each rank.

        # 1F1B on two ranks. Blank lines and what follows a # do not count.
        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

    Any order is allowed in which each forward stands before its backward, which is whole (B) or in
    two halves (I, then W). A rank may have any number of stages. `schedules.deadlock` later checks
    the programs with their transfers for deadlocks.

    Args:
        turns: for each stage the number of its entries, which take turns; empty: one entry each.

    Raises:
        ScheduleError: a line or an instruction cannot be read or is no compute; a stage is on two
            ranks or on none; an instruction stands twice, is missing or stands too early.
    """
    programs = parse_programs("\n".join(line.partition("#")[0] for line in text.splitlines()))
    for rank, program in enumerate(programs):
        _check_order(rank, program)
    last = max((i for program in programs for i in program), key=_microbatch, default=None)
    if last is None:
        raise ScheduleError(
            "expected a schedule, found no instruction", hint="a line looks like `rank 0: 0F0 0B0`"
        )
    ranks = holders(programs)
    entries = Entries.at(turns or (1,) * len(ranks))
    for stage, rank in zip(range(len(entries.stages)), ranks, strict=False):
        instructions = set(programs[rank])
        for k in entries.taken(stage, range(last.microbatch + 1)):
            f, b, i, w = (Instruction(kind, stage, k) for kind in _BEFORE)
            ends = w if i in instructions else b
            missing = next((needed for needed in (f, ends) if needed not in instructions), None)
            if missing is not None:
                raise ScheduleError(
                    f"rank {rank}: {missing} is missing; every stage runs micro-batches 0 to "
                    f"{last.microbatch}, as {last} has it"
                )
    return programs


_BEFORE = {
    Kind.FORWARD: None,
    Kind.BACKWARD: Kind.FORWARD,
    Kind.BACKWARD_INPUT: Kind.FORWARD,
    Kind.BACKWARD_WEIGHT: Kind.BACKWARD_INPUT,
}
"""The instructions of the same stage and micro-batch that must precede a compute instruction."""


def _check_order(rank: int, program: Program) -> None:
    """Check the rules for one rank's line that need no other line."""
    if not program:
        raise ScheduleError(f"rank {rank} has nothing to do")
    before: set[Instruction] = set()
    for instruction in program:
        kind, stage, k = instruction[:3]
        if kind not in _BEFORE:
            raise ScheduleError(
                f"rank {rank}: expected compute alone, found {instruction}",
                hint="a schedule has F, B, I and W; transfers and sums are put in later",
            )
        if instruction in before:
            raise ScheduleError(f"rank {rank}: {instruction} appears twice")
        first = _BEFORE[kind]
        if first is not None and (needed := Instruction(first, stage, k)) not in before:
            fault = "stands after it" if needed in program else "is missing"
            raise ScheduleError(
                f"rank {rank}: {instruction} needs {needed} before it, which {fault}"
            )
        before.add(instruction)
        whole, half = (Instruction(b, stage, k) for b in (Kind.BACKWARD, Kind.BACKWARD_INPUT))
        if whole in before and half in before:
            raise ScheduleError(
                f"rank {rank}: both {whole} and {half} stand, a whole backward and half of one",
                hint="a backward is B, or I and later W",
            )


def _microbatch(instruction: Instruction) -> int:
    return instruction.microbatch
