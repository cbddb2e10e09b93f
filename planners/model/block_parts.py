"""Describe ranges of units as parts of blocks, and what each part saves if it runs again.

    units       0    1    2    3    4    5          blocks  a [0, 2)   b [2, 4)   c [4, 6), alike
    [1, 6)           |-a--|----b----|----c----|     two whole blocks, and the last unit of one

Blocks of a deep model are alike, so a range is described by its *composition*: how many whole
blocks of each class it has, and which parts of its first and last block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autopipe.planners.model.level_mixes import Numbers
from autopipe.planners.model.problem import WHOLE, Problem, Saved
from autopipe.planners.model.range_tables import Bytes, dropped


class BlockPart(NamedTuple):
    """Units [first, last) of a block, counted from its own first unit."""

    kind: int
    first: int
    last: int


@dataclass(frozen=True)
class BlockClasses:
    """The classes of blocks that cost the same.

    Args:
        kinds: for each block the number of its class; blocks of a class cost the same part by part.
        firsts: for each class the number of its first block.
        wholes: for each class, the part that stands for one of its whole blocks; classes whose
            whole blocks cost the same share one.
    """

    kinds: tuple[int, ...]
    firsts: tuple[int, ...]
    wholes: tuple[BlockPart, ...]

    def part(self, problem: Problem, block: int, first: int, last: int) -> BlockPart:
        """The part of a block in the units [first, last)."""
        start, stop = problem.recomputable[block]
        kind = self.kinds[block]
        if first <= start and stop <= last:
            return self.wholes[kind]
        return BlockPart(kind, max(first - start, 0), min(last, stop) - start)


@dataclass(frozen=True, eq=False)
class Compositions:
    """The composition of every range of units.

    Args:
        number: entry [i, j] is the number of the composition of the range [i, j).
        parts: for each composition its parts, each with the number of blocks that it stands for.
    """

    classes: BlockClasses
    number: Numbers
    parts: tuple[dict[BlockPart, int], ...]


@lru_cache(maxsize=16)
def compositions(problem: Problem) -> Compositions:
    """The compositions of a problem's ranges; the results for the last problems are cached."""
    classes = _classes(problem)
    n, blocks = problem.units, np.array(problem.recomputable, np.int64).reshape(-1, 2)
    units = np.arange(n + 1)
    head = np.searchsorted(blocks[:, 1], units, side="right")  # the first block that ends after i
    tail = np.searchsorted(blocks[:, 0], units, side="left") - 1  # the last that begins before j
    number = np.zeros((n + 1, n + 1), np.int64)
    known: dict[tuple[tuple[BlockPart, int], ...], int] = {(): 0}

    def part(block: int, first: int, last: int) -> BlockPart | None:
        return classes.part(problem, block, first, last) if 0 <= block < len(blocks) else None

    ahead = [part(int(head[i]), i, n) for i in range(n + 1)]
    behind = [part(int(tail[j]), 0, j) for j in range(n + 1)]
    whole = frozenset(classes.wholes)
    passed = [Counter[BlockPart]()]
    for kind in classes.kinds:
        passed.append(passed[-1] + Counter([classes.wholes[kind]]))
    between: dict[tuple[int, int], dict[BlockPart, int]] = {}
    for i in range(n):
        for j in range(i + 1, n + 1):
            if head[i] > tail[j]:
                continue
            if head[i] == tail[j]:
                parts = {classes.part(problem, int(head[i]), i, j): 1}
            else:
                inner = (int(head[i]) + 1, int(tail[j]))
                if inner not in between:
                    between[inner] = dict(passed[inner[1]] - passed[inner[0]])
                parts = dict(between[inner])
                for end in (ahead[i], behind[j]):
                    if end is not None:
                        parts[end] = parts.get(end, 0) + 1
            # Whole blocks first: ranges share them, and so their sets.
            key = tuple(sorted(parts.items(), key=lambda item: (item[0] not in whole, item[0])))
            number[i, j] = known.setdefault(key, len(known))
    return Compositions(classes, number, tuple(map(dict, known)))


def part_levels(problem: Problem, part: BlockPart) -> tuple[int, ...]:
    """The levels at which a part of a block may run again; the last one is `WHOLE`."""
    block = compositions(problem).classes.firsts[part.kind]
    start, stop = problem.recomputable[block]
    levels = problem.profiles[0].levels
    asked = problem.constraints.recompute is not None
    whole = asked or part[1:] == (0, stop - start)
    return (*range(len(levels[block]) if levels and whole else 0), WHOLE)


@lru_cache(maxsize=4096)
def figures(
    problem: Problem,
    rows: int,
    kind: int,
    block: int,
    part: tuple[int, int],
    level: int = WHOLE,
) -> tuple[int, float]:
    """Bytes that a part of a block saves by running again at a level, and the seconds of that."""
    profile = problem.profile(rows)
    if level != WHOLE:
        of_level = profile.levels[block][level]
        again = of_level.seconds[kind][slice(*part)]
        return of_level.dropped if len(again) == len(of_level.seconds[kind]) else 0, sum(again)
    first, last = part
    seconds = sum(profile.recompute[block][kind][first:last])
    return int(_matrices(problem, rows)[block][first, last]), seconds


@lru_cache(maxsize=64)
def _matrices(problem: Problem, rows: int) -> tuple[Bytes, ...]:
    """For each block the bytes that each of its parts saves: entry [first, last]."""
    items: list[list[Saved]] = [[] for _ in problem.recomputable]
    for saved in problem.profile(rows).saved:
        if saved.block is not None:
            start = problem.recomputable[saved.block][0]
            producer = None if saved.producer is None else saved.producer - start
            savers = tuple(saver - start for saver in saved.savers)
            items[saved.block].append(replace(saved, producer=producer, savers=savers))
    return tuple(
        dropped(stop - start, saved_by_block)
        for (start, stop), saved_by_block in zip(problem.recomputable, items, strict=True)
    )


def _classes(problem: Problem) -> BlockClasses:
    fixed = dict(problem.constraints.recompute or ())
    away = frozenset(problem.constraints.offload or ())
    known: dict[object, int] = {}
    known_wholes: dict[object, BlockPart] = {}
    kinds, firsts, wholes = [], [], []
    for block, (start, stop) in enumerate(problem.recomputable):
        sizes = [_matrices(problem, profile.rows)[block] for profile in problem.profiles]
        spent = [profile.recompute[block] for profile in problem.profiles]
        saves = [int(size[0, -1]) for size in sizes]
        for profile in problem.profiles:
            for level in profile.levels[block] if profile.levels else ():
                saves.append(level.dropped)
                spent.append(level.seconds)
        constraints = fixed.get(block), block in away, *saves
        key = (
            *constraints,
            *(size.tobytes() for size in sizes),
            *(_rounded(kind) for kinds in spent for kind in kinds),
        )
        whole_key = *constraints, _rounded(sum(kind) for kinds in spent for kind in kinds)
        if key not in known:
            known[key] = len(known)
            firsts.append(block)
            wholes.append(
                known_wholes.setdefault(whole_key, BlockPart(known[key], 0, stop - start))
            )
        kinds.append(known[key])
    return BlockClasses(tuple(kinds), tuple(firsts), tuple(wholes))


def _rounded(seconds: Iterable[float]) -> tuple[str, ...]:
    """Seconds rounded, so that sums of equal terms in another order are equal."""
    return tuple(f"{each:.9e}" for each in seconds)
