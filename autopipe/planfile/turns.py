"""Stages that several ranks of a pipeline take turns at, read off a plan's list of stages.

    stages    0: embed .. h.3     1: h.4 .. loss     2: h.4 .. loss       turns (1, 2)
    rank 0    all micro-batches
    rank 1                        0, 2, 4, ...
    rank 2                                           1, 3, 5, ...

A stage that takes n times as long as the others keeps up with them on n ranks. (PipeDream,
Narayanan et al., SOSP 2019, section 3.2, replicates stages so; Piper, Tarnawski et al., NeurIPS
2021, plans with it.) The i-th of its n entries in the list runs micro-batches i, i + n, i + 2n, ...
Each rank has its parameters, whose gradients are summed as those of tied ones are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from autopipe.planfile.consistency import Refuse
from autopipe.planfile.parts import StagePlan

TAKES_TURNS = "1f1b"
"""The schedule whose programs are known for such stages."""


def of_each(stages: Sequence[StagePlan]) -> tuple[int, ...]:
    """For each stage the number of its ranks; empty if each has one."""
    found, entry = list[int](), 0
    while entry < len(stages):
        found.append(max(stages[entry].turns, 1))
        entry += found[-1]
    return () if len(found) == len(stages) else tuple(found)


def each_once(stages: Sequence[StagePlan]) -> tuple[StagePlan, ...]:
    """The first entry of each stage."""
    found = of_each(stages)
    return tuple(stages[entry] for entry in (0, *accumulate(found[:-1]))) if found else (*stages,)


def taking_turns(stages: Sequence[StagePlan], index: int) -> tuple[int, ...]:
    """All entries of the stage to which one entry belongs."""
    first = 0
    for of in of_each(stages):
        if index < first + of:
            return tuple(range(first, first + of))
        first += of
    return (index,)


def rounds(stages: Sequence[StagePlan], index: int, micro_batches: int) -> int:
    """The number of micro-batches that an entry runs, of all of a step."""
    entries = taking_turns(stages, index)
    return len(range(index - entries[0], micro_batches, len(entries)))


def check(
    stages: Sequence[StagePlan],
    schedule: str,
    micro_batches: int,
    refuse: Refuse,
) -> None:
    """Refuse entries of one stage that differ, and turns that the plan's other parts rule out."""
    for index, stage in enumerate(stages):
        most = len(stages) - taking_turns(stages, index)[0]
        if not 1 <= stage.turns <= most:
            refuse(f"stages[{index}].turns", f"1 to {most}, one an entry", str(stage.turns))
    turns = of_each(stages)
    if not turns:
        return
    if schedule != TAKES_TURNS:
        refuse("schedule", f"{TAKES_TURNS}, as ranks take turns at a stage", schedule)
    if micro_batches < max(turns):
        least = f"at least {max(turns)}, as so many ranks take turns at a stage"
        refuse("batch.micro_batches", least, str(micro_batches))
    for index, stage in enumerate(stages):
        first = stages[taking_turns(stages, index)[0]]
        if stage.zero > 1:
            expected = "0 or 1, as ranks take turns at a stage"
            refuse(f"stages[{index}].zero", expected, str(stage.zero))
        for key in ("turns", "first", "last", "nodes", "parameters", "recompute", "offload"):
            if getattr(stage, key) != getattr(first, key):
                refuse(
                    f"stages[{index}].{key}",
                    f"that of the stage with which it takes turns, {getattr(first, key)!r}",
                    repr(getattr(stage, key)),
                )
