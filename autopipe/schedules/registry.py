"""The training schedules by name: the properties of each, and the programs that a name stands for.

    make("1f1b", ranks=2, micro_batches=3)   ->   0F0 0F1 0B0 0F2 0B1 0B2   and   1F0 1B0 1F1 ...
    in_flight("1f1b", 2, 3, stage=0)         ->   2 micro-batches whose activations stage 0 holds

To add a schedule, write its generator in `schedules.generators` and enter it in `SCHEDULES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopipe.errors import ScheduleError
from autopipe.schedules.generators import (
    eager_one_f_one_b,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    one_f_one_b_in_turns,
    zb_h1,
    zb_v,
)
from autopipe.schedules.instructions import FINAL, Kind, Program, Programs, holders


@dataclass(frozen=True)
class Schedule:
    """The properties of a schedule.

    Attributes:
        function: the generator.
        chunks: the stages on each rank; None: the caller of `make` says how many, 2 or more.
        splits: whether its backwards are in two halves, I and W.
        depths: whether it takes a depth for each boundary.
        turns: whether ranks may take turns at a stage.
        holds_all: whether a stage may hold all micro-batches of a step at once. If not, a rank that
            holds one for each rank and chunk frees one for each that comes.
    """

    function: Callable[..., Programs]
    chunks: int | None = 1
    splits: bool = False
    depths: bool = False
    turns: bool = False
    holds_all: bool = False


SCHEDULES: dict[str, Schedule] = {
    "naive": Schedule(naive),
    "gpipe": Schedule(gpipe, holds_all=True),
    "1f1b": Schedule(one_f_one_b, turns=True),
    "eager-1f1b": Schedule(eager_one_f_one_b, depths=True),
    "interleaved": Schedule(interleaved, chunks=None),
    "zb-h1": Schedule(zb_h1, splits=True),
    "zb-v": Schedule(zb_v, chunks=2, splits=True),
}
"""The training schedules by the name a plan gives them."""


def named(name: str) -> Schedule:
    """The schedule of that name.

    Raises:
        ScheduleError: there is none.
    """
    if name not in SCHEDULES:
        raise ScheduleError(
            f"there is no schedule {name!r}", hint=f"the schedules are {', '.join(SCHEDULES)}"
        )
    return SCHEDULES[name]


def make(
    name: str,
    ranks: int,
    micro_batches: int,
    *,
    chunks: int = 1,
    depths: Sequence[int] = (),
    turns: Sequence[int] = (),
) -> Programs:
    """The compute programs of the schedule `name`.

    Args:
        name: one of `SCHEDULES`.
        ranks, micro_batches: how many.
        chunks: the stages on each rank.
        depths: for eager-1f1b, one per boundary; empty: zeros.
        turns: for 1f1b, the number of ranks that take turns at each stage; empty: ones.

    Raises:
        ScheduleError: there is no schedule of that name, or it does not allow these ranks,
            micro-batches, chunks, depths or turns.
    """
    schedule = named(name)
    if turns:
        return _in_turns(name, ranks, micro_batches, turns)
    if schedule.chunks is None and chunks < 2:
        raise ScheduleError(
            f"schedule {name} puts at least 2 stages on each rank, found {chunks}",
            hint="1f1b is for one stage on each rank",
        )
    if schedule.chunks is not None and chunks != schedule.chunks:
        raise ScheduleError(
            f"schedule {name} puts {schedule.chunks} "
            f"stage{'' if schedule.chunks == 1 else 's'} on each rank, found {chunks}",
            hint="1f1b is for one stage on each rank"
            if chunks == 1
            else "interleaved takes any number from 2 on",
        )
    if depths and not schedule.depths:
        raise ScheduleError(
            f"schedule {name} takes no depths, found {', '.join(map(str, depths))}",
            hint="eager-1f1b does",
        )
    if schedule.chunks is None:
        return schedule.function(ranks, micro_batches, chunks)
    if schedule.depths:
        return schedule.function(ranks, micro_batches, depths or (0,) * (ranks - 1))
    return schedule.function(ranks, micro_batches)


def _in_turns(name: str, ranks: int, micro_batches: int, turns: Sequence[int]) -> Programs:
    if not named(name).turns:
        raise ScheduleError(
            f"schedule {name} has each stage on one rank, found turns {', '.join(map(str, turns))}",
            hint="under 1f1b ranks may take turns at a stage",
        )
    if sum(turns) != ranks:
        raise ScheduleError(
            f"turns {', '.join(map(str, turns))} are {sum(turns)} ranks, found {ranks}"
        )
    return one_f_one_b_in_turns(turns, micro_batches)


def in_flight(
    name: str,
    ranks: int,
    micro_batches: int,
    stage: int,
    *,
    chunks: int = 1,
    depths: Sequence[int] = (),
) -> int:
    """The most micro-batches whose activations `stage` holds at once under schedule `name`.

    Raises:
        ScheduleError: as `make`.
    """
    return _in_flight(name, ranks, micro_batches, chunks, tuple(depths))[stage]


@functools.cache
def _in_flight(
    name: str, ranks: int, micro_batches: int, chunks: int, depths: tuple[int, ...]
) -> tuple[int, ...]:
    """`in_flight` of all stages: a planner asks for the same few thousands of times."""
    if not named(name).holds_all:
        most = ranks * chunks + sum(depth for depth in depths if depth > 0)
        micro_batches = min(micro_batches, most)
    programs = make(name, ranks, micro_batches, chunks=chunks, depths=depths)
    return tuple(flying(programs[rank], stage) for stage, rank in enumerate(holders(programs)))


def flying(program: Program, stage: int) -> int:
    """The most micro-batches whose activations `stage` holds at once in a program.

    F allocates them; B frees them, or W if backward is split.
    """
    held = peak = 0
    for instruction in program:
        if instruction.stage == stage:
            if instruction.kind is Kind.FORWARD:
                held += 1
                peak = max(peak, held)
            elif instruction.kind in FINAL:
                held -= 1
    return peak


def between_halves(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> tuple[int, ...]:
    """`waiting` of each stage under schedule `name`.

    Raises:
        ScheduleError: as `make`.
    """
    stages = ranks * chunks
    # More micro-batches than two for each stage repeat the same pattern.
    return _between_halves(name, ranks, min(micro_batches, 2 * stages), chunks)


@functools.cache
def _between_halves(name: str, ranks: int, micro_batches: int, chunks: int) -> tuple[int, ...]:
    """`between_halves`, which a planner asks for as often as for `in_flight`."""
    programs = make(name, ranks, micro_batches, chunks=chunks)
    return tuple(waiting(programs[rank], stage) for stage, rank in enumerate(holders(programs)))


def waiting(program: Program, stage: int) -> int:
    """How many of the micro-batches that `stage` holds at once are between the halves of their
    backward, their I done and their W not, when it holds the most."""
    held = between = 0
    most = 0, 0
    for instruction in program:
        if instruction.stage == stage:
            held += instruction.kind is Kind.FORWARD
            held -= instruction.kind in FINAL
            between += instruction.kind is Kind.BACKWARD_INPUT
            between -= instruction.kind is Kind.BACKWARD_WEIGHT
            if instruction.kind is Kind.BACKWARD_INPUT:
                most = max(most, (held, between))
    return most[1]
