"""Sums over every range of units: seconds, and bytes held, saved, received and sent.

A model of n units has n (n + 1) / 2 ranges, and a planner asks for most of them. All are summed
once, as arrays: entry [i, j] is of the range [i, j).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopipe.planners.model.problem import Crossing, Problem, Profile, Saved, Seconds, Shared

Bytes = NDArray[np.int64]
Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tables:
    """Sums over ranges of units: every field is an array of one shape, an entry per range.

    `tables` gives all ranges, shape (units + 1, units + 1), where entry [i, j] is of the range
    [i, j) and zero unless i < j. `at` selects some of them, in any shape: one range gives arrays of
    shape (). Seconds (float64) and bytes (int64) are of one micro-batch, but for `trainable`,
    `constants`, `gathered` and `largest`, which a stage has once; `forward`,
    `backward` and `exchange` have an array for each kind of device; without tensor parallelism
    `exchange` has none.

    `earlier` are backward seconds of all units before the range, each on the kind of device that
    takes least.

    `gathered` are bytes of parameters that ZeRO-3 makes whole while a backward runs
    (`gathered_bytes`): of the largest block that the range has any unit of, and of what is
    trainable in the range and in no block. `largest` are bytes of the largest gradient that one of
    the range's units makes.
    """

    forward: tuple[Times, ...]
    backward: tuple[Times, ...]
    earlier: Times
    exchange: tuple[Times, ...]
    trainable: Bytes
    constants: Bytes
    gathered: Bytes
    largest: Bytes
    saved: Bytes
    received: Bytes
    received_gradient: Bytes
    sent: Bytes
    sent_gradient: Bytes

    def at(self, first: ArrayLike, end: ArrayLike) -> Tables:
        """The ranges [first, end), two index arrays of one shape, which the fields then have."""
        index = np.asarray(first), np.asarray(end)

        def select(whole: tuple[Times, ...] | NDArray[np.generic]) -> object:
            if isinstance(whole, tuple):
                return tuple(np.asarray(kind[index]) for kind in whole)
            return np.asarray(whole[index])

        return Tables(*(select(getattr(self, field.name)) for field in fields(self)))  # type: ignore[arg-type]


def tables(problem: Problem, profile: Profile) -> Tables:
    """All ranges of the problem's units under one profile; the last few are remembered."""
    return _tables(problem, profile.rows)


@lru_cache(maxsize=64)
def _tables(problem: Problem, rows: int) -> Tables:
    profile = problem.profile(rows)
    units, crossings = problem.units, profile.crossings
    returning = tuple(crossing for crossing in crossings if crossing.gradient)
    held = _of_states(
        units,
        problem.parameters,
        problem.constants,
        problem.blocks,
        problem.largest or (0,) * units,
    )
    return Tables(
        forward=tuple(map(_prefix, profile.forward)),
        backward=tuple(map(_prefix, profile.backward)),
        earlier=_earlier(tuple(map(min, zip(*profile.backward, strict=True)))),
        exchange=tuple(map(_prefix, profile.exchange)),
        trainable=held[0],
        constants=held[1],
        gathered=held[2],
        largest=held[3],
        saved=_fill(units, _saved(units, profile.saved)),
        received=_fill(units, _received(units, crossings)),
        received_gradient=_fill(units, _received(units, returning)),
        sent=_fill(units, _sent(crossings)),
        sent_gradient=_fill(units, _sent(returning)),
    )


# What a stage pays for is a set of items, and an item counts for a range at most once. In the plane
# of ranges (first unit i, end j) the ranges that hold an item with member units p1 < p2 < ... are
# disjoint rectangles, one per member that is the range's first:
#
#     p_{k-1} < i <= p_k < j
#
# A rectangle is two or four corners in a difference array; one running sum along each axis fills
# all of them in.
_Rectangle = tuple[int, int, int, int, int]  # bytes, for first <= i <= last and low <= j <= high


@lru_cache(maxsize=16)
def _of_states(
    units: int,
    parameters: tuple[Shared, ...],
    constants: tuple[Shared, ...],
    blocks: tuple[tuple[int, int], ...],
    largest: tuple[int, ...],
) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """What no profile changes: trainable, constant and gathered bytes, and the largest gradient."""
    return (
        _fill(units, _held(units, parameters)),
        _fill(units, _held(units, constants)),
        _gathered(units, parameters, blocks),
        _largest(largest),
    )


def _prefix(seconds: Seconds) -> Times:
    sums = np.concatenate(([0.0], np.cumsum(seconds)))
    return np.triu(sums[None, :] - sums[:, None])


def _earlier(seconds: Seconds) -> Times:
    sums = np.concatenate(([0.0], np.cumsum(seconds)))
    return np.triu(np.broadcast_to(sums[:, None], (len(sums), len(sums))), 1)


def _largest(sizes: Sequence[int]) -> Bytes:
    """The largest of the sizes in each range."""
    found = np.zeros((len(sizes) + 1, len(sizes) + 1), dtype=np.int64)
    for first in range(len(sizes)):
        found[first, first + 1 :] = np.maximum.accumulate(sizes[first:])
    return found


def _fill(units: int, rectangles: Iterable[_Rectangle]) -> Bytes:
    corners = np.zeros((units + 2, units + 2), dtype=np.int64)
    for size, first, last, low, high in rectangles:
        if first <= last and low <= high:
            corners[first, low] += size
            corners[last + 1, low] -= size
            corners[first, high + 1] -= size
            corners[last + 1, high + 1] += size
    return corners.cumsum(axis=0).cumsum(axis=1)[: units + 1, : units + 1]


def _held(units: int, items: tuple[Shared, ...]) -> Iterable[_Rectangle]:
    for item in items:
        for before, member in zip((-1, *item.units), item.units, strict=False):
            yield item.bytes, before + 1, member, member + 1, units


def _gathered(
    units: int, parameters: tuple[Shared, ...], blocks: tuple[tuple[int, int], ...]
) -> Bytes:
    largest = np.zeros((units + 1, units + 1), dtype=np.int64)
    outside = parameters
    for first, stop in blocks:
        own = {p for p in outside if first <= p.units[0] and p.units[-1] < stop}
        size = sum(parameter.bytes for parameter in outside if parameter in own)
        outside = tuple(parameter for parameter in outside if parameter not in own)
        having = largest[:stop, first + 1 :]  # the ranges [i, j) with i < stop and j > first
        np.maximum(having, size, out=having)
    return gathered_bytes(_fill(units, _held(units, outside)), np.triu(largest, 1))


Size = TypeVar("Size", int, Bytes)


def gathered_bytes(outside: Size, block: Size) -> Size:
    """Bytes that ZeRO-3 holds whole while a backward runs, as `runtime.parameters.zero3` has it.

    Args:
        outside: R, bytes of the stage's trainable parameters that are in no block.
        block: U, bytes of those of its largest block.
    """
    return 2 * outside + 7 * block


def dropped(units: int, items: Iterable[Saved]) -> Bytes:
    """Bytes that each range saves of these items alone, as `Tables.saved` counts them."""
    return _fill(units, _saved(units, items))


def _saved(units: int, items: Iterable[Saved]) -> Iterable[_Rectangle]:
    for item in items:
        for before, saver in zip((-1, *item.savers), item.savers, strict=False):
            # A range that starts after the producer has received the tensor: see `_received`.
            last = saver if item.producer is None else min(saver, item.producer)
            yield item.bytes, before + 1, last, saver + 1, units


def _received(units: int, items: tuple[Crossing, ...]) -> Iterable[_Rectangle]:
    for item in items:
        for before, user in zip((item.producer, *item.consumers), item.consumers, strict=False):
            yield item.bytes, before + 1, user, user + 1, units


def _sent(items: tuple[Crossing, ...]) -> Iterable[_Rectangle]:
    for item in items:
        yield item.bytes, 0, item.producer, item.producer + 1, item.consumers[-1]
