"""Sums over every range of units: seconds, and bytes held, saved, received and sent.

A model of n units has n (n + 1) / 2 ranges, and a planner asks for most of them. All are summed
once, as arrays: entry [i, j] is of the range [i, j).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopipe.planners.model.problem import Crossing, Problem, Profile, Saved, Seconds, Shared

Bytes = NDArray[np.int64]
Times = NDArray[np.float64]
Ranges = tuple[slice, slice]
"""Some ranges of units: all that begin with some of them and end before some."""


@dataclass(frozen=True, eq=False)
class Tables:
    """Sums over ranges of units: every field is an array of one shape, an entry per range.

    `tables` gives all ranges, shape (units + 1, units + 1), where entry [i, j] is of the range
    [i, j) and zero unless i < j. `at` selects some of them, in any shape: one range gives arrays of
    shape (). Seconds (float64) and bytes (int64) are of one micro-batch, but for `trainable` to
    `largest`, which a stage has once.

    Attributes:
        forward, backward: seconds, an array for each kind of device.
        earlier: backward seconds of all units before the range, each on the fastest kind of device.
        exchange: seconds of tensor-parallel exchanges, as `forward`; empty without any.
        trainable, frozen: bytes of parameters, as a rank holds them.
        constants: bytes of other held states.
        copies: bytes of the copies of masters that forward reads.
        summed: bytes of all gradients, in the dtype in which they are summed.
        onward: those of parameters that units behind the range use too, and none before it.
        block: bytes of parameters, as forward reads them, of the largest block that the range has
            any unit of, or of the largest unit outside of blocks: what ZeRO-3 gathers at once.
        opening, closing: the same of the block of the range's first unit, and of its last unit,
            with which a forward and a backward begin.
        tied: bytes of parameters that units of several blocks use, which stay gathered.
        largest: bytes of the largest gradient that a unit of the range makes.
        added: those, if they are not in `made`.
        saved: bytes kept for backward.
        made: the most bytes that the backward of a unit has made and holds, less what later units
            have freed by then; and the gradients of parameters that several units of the range
            use, from their last use to the first.
        waiting: how many bytes more a micro-batch holds between the halves of its backward.
        passing: bytes within a loss's backward.
        received, sent: bytes of activations; `..._gradient`: of their gradients.
        parted: the received bytes that may come in parts; `parted_gradient`: those of them whose
            gradient goes back (`planners.model.transfers`).
    """

    forward: tuple[Times, ...]
    backward: tuple[Times, ...]
    earlier: Times
    exchange: tuple[Times, ...]
    trainable: Bytes
    frozen: Bytes
    constants: Bytes
    copies: Bytes
    summed: Bytes
    onward: Bytes
    block: Bytes
    opening: Bytes
    closing: Bytes
    tied: Bytes
    largest: Bytes
    added: Bytes
    saved: Bytes
    made: Bytes
    waiting: Bytes
    passing: Bytes
    received: Bytes
    received_gradient: Bytes
    sent: Bytes
    sent_gradient: Bytes
    parted: Bytes
    parted_gradient: Bytes

    def at(self, first: ArrayLike, end: ArrayLike) -> Tables:
        """The ranges [first, end), two index arrays of one shape, which the fields then have."""
        index = np.asarray(first), np.asarray(end)
        return self._each(lambda table: table[index])

    def rectangle(self, ranges: Ranges) -> Tables:
        """The ranges of a rectangle of the table, in its shape."""
        return self._each(lambda table: table[ranges])

    def only(self, wanted: NDArray[np.bool_]) -> Tables:
        """Some of these ranges, in a row."""
        return self._each(lambda table: table[wanted])

    def _each(self, select: Callable[[NDArray[Any]], NDArray[Any]]) -> Tables:
        """These tables with a function applied to every array."""

        def of(table: tuple[Times, ...] | NDArray[Any]) -> object:
            if isinstance(table, tuple):
                return tuple(np.asarray(select(kind)) for kind in table)
            return np.asarray(select(table))

        return Tables(*(of(getattr(self, field.name)) for field in fields(self)))  # type: ignore[arg-type]

    @property
    def read(self) -> Bytes:
        """Bytes of the trainable parameters as forward reads them: a copy is half of a master."""
        return self.trainable - self.copies

    @property
    def gathered(self) -> Bytes:
        """Bytes that ZeRO-3 gathers for a forward: of frozen parameters too."""
        return self.read + self.frozen


def tables(problem: Problem, profile: Profile) -> Tables:
    """All ranges of the problem's units under one profile; the last few are remembered."""
    return _tables(problem, profile.rows)


@lru_cache(maxsize=64)
def _tables(problem: Problem, rows: int) -> Tables:
    profile = problem.profile(rows)
    units, crossings = problem.units, profile.crossings
    returning = tuple(crossing for crossing in crossings if crossing.gradient)
    dividing, dividing_back = (tuple(c for c in way if c.divides) for way in (crossings, returning))
    states = _of_states(
        units,
        problem.parameters,
        problem.frozen,
        problem.constants,
        problem.copies,
        problem.blocks,
        problem.largest or (0,) * units,
    )
    saved = _fill(units, _saved(units, profile.saved))
    low = problem.copies if problem.low_gradients else ()
    return Tables(
        forward=tuple(map(_prefix, profile.forward)),
        backward=tuple(map(_prefix, profile.backward)),
        earlier=_earlier(tuple(map(min, zip(*profile.backward, strict=True)))),
        exchange=tuple(map(_prefix, profile.exchange)),
        **states._asdict(),
        summed=states.trainable - (states.copies if problem.low_gradients else 0),
        onward=_fill(units, _onward(problem.parameters)) - _fill(units, _onward(low)),
        added=states.largest * (not profile.made),
        saved=saved,
        made=_made_beside_sums(problem, profile.made, saved),
        waiting=np.maximum(_prefix(profile.waiting or (0,) * units), 0).astype(np.int64),
        passing=_largest(profile.passing or (0,) * units),
        received=_fill(units, _received(units, crossings)),
        received_gradient=_fill(units, _received(units, returning)),
        sent=_fill(units, _sent(crossings)),
        sent_gradient=_fill(units, _sent(returning)),
        parted=_fill(units, _received(units, dividing)),
        parted_gradient=_fill(units, _received(units, dividing_back)),
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


class _OfStates(NamedTuple):
    """The fields of `Tables` that are equal in all profiles."""

    trainable: Bytes
    frozen: Bytes
    constants: Bytes
    copies: Bytes
    block: Bytes
    opening: Bytes
    closing: Bytes
    tied: Bytes
    largest: Bytes


@lru_cache(maxsize=16)
def _of_states(
    units: int,
    parameters: tuple[Shared, ...],
    frozen: tuple[Shared, ...],
    constants: tuple[Shared, ...],
    copies: tuple[Shared, ...],
    blocks: tuple[tuple[int, int], ...],
    largest: tuple[int, ...],
) -> _OfStates:
    block = np.zeros((units + 1, units + 1), dtype=np.int64)
    tied, tied_copies = (*parameters, *frozen), copies
    for first, stop in (*blocks, *((unit, unit + 1) for unit in range(units))):
        size, tied = _exclusive(tied, first, stop)
        low, tied_copies = _exclusive(tied_copies, first, stop)
        having = block[:stop, first + 1 :]  # the ranges [i, j) with i < stop and j > first
        np.maximum(having, size - low, out=having)

    def bytes_of(items: tuple[Shared, ...]) -> Bytes:
        return _fill(units, _held(units, items))

    opening, closing = _edges(units, (*parameters, *frozen), copies, blocks)
    return _OfStates(
        trainable=bytes_of(parameters),
        frozen=bytes_of(frozen),
        constants=bytes_of(constants),
        copies=bytes_of(copies),
        block=np.triu(block, 1),
        opening=opening,
        closing=closing,
        tied=bytes_of(tied) - bytes_of(tied_copies),
        largest=_largest(largest),
    )


def _edges(
    units: int,
    items: tuple[Shared, ...],
    copies: tuple[Shared, ...],
    blocks: tuple[tuple[int, int], ...],
) -> tuple[Bytes, Bytes]:
    """For each range the bytes read of the parameters of its first and of its last unit's block."""
    number = list(range(units))
    for first, stop in blocks:
        number[first:stop] = [first] * (stop - first)
    read = np.zeros(units, dtype=np.int64)
    for item in items:
        read[[*{number[unit] for unit in item.units}]] += item.bytes
    for item in copies:
        read[[*{number[unit] for unit in item.units}]] -= item.bytes
    of_unit = np.append(read[number], 0)
    shape = (units + 1, units + 1)
    opening = np.broadcast_to(of_unit[:, None], shape)
    closing = np.broadcast_to(np.roll(of_unit, 1), shape)
    return np.triu(opening, 1), np.triu(closing, 1)


def _exclusive(items: tuple[Shared, ...], first: int, stop: int) -> tuple[int, tuple[Shared, ...]]:
    """Bytes of the items that only the units [first, stop) use, and the other items."""
    alone = {item for item in items if first <= item.units[0] and item.units[-1] < stop}
    rest = tuple(item for item in items if item not in alone)
    return sum(item.bytes for item in items if item in alone), rest


def _prefix(seconds: Seconds) -> Times:
    sums = np.concatenate(([0.0], np.cumsum(seconds)))
    return np.triu(sums[None, :] - sums[:, None])


def _earlier(seconds: Seconds) -> Times:
    sums = np.concatenate(([0.0], np.cumsum(seconds)))
    return np.triu(np.broadcast_to(sums[:, None], (len(sums), len(sums))), 1)


def _largest(sizes: Sequence[int]) -> Bytes:
    """The largest of the sizes in each range."""
    largest = np.zeros((len(sizes) + 1, len(sizes) + 1), dtype=np.int64)
    for first in range(len(sizes)):
        largest[first, first + 1 :] = np.maximum.accumulate(sizes[first:])
    return largest


def _made(sizes: Sequence[int], saved: Bytes) -> Bytes:
    """`Tables.made` of every range, from the bytes that units make and that ranges save.

    When the backward of a unit runs, later units have freed what only they had saved.
    """
    units = len(sizes)
    beyond = np.array(sizes, dtype=np.int64)[:, None] - saved[1:]
    earlier = np.arange(units)[:, None] < np.arange(units + 1)  # by unit, and end of the range
    made = np.zeros_like(saved)
    made[:-1] = np.maximum.accumulate(np.where(earlier, beyond, 0)[::-1])[::-1]
    return np.maximum(made, 0)


def _used_again(units: int, items: Iterable[Shared]) -> Iterable[_Rectangle]:
    """The ranges in which two or more units use an item."""
    for item in items:
        for before, unit, later in zip((-1, *item.units), item.units, item.units[1:], strict=False):
            yield item.bytes, before + 1, unit, later + 1, units


def _made_beside_sums(problem: Problem, sizes: Sequence[int], saved: Bytes) -> Bytes:
    """`Tables.made` with the gradients of parameters that several units of a range use. Such a
    gradient is there from the backward of its last use on, and so not while later units run.
    """
    if not sizes:
        return np.zeros_like(saved)
    last = max((item.units[-1] for item in problem.parameters if len(item.units) > 1), default=0)
    before = _made((*sizes[:last], *[0] * (problem.units - last)), saved)
    kinds = problem.parameters, problem.copies
    sums = np.subtract(*(_fill(problem.units, _used_again(problem.units, of)) for of in kinds))
    return np.maximum(_made(sizes, saved), before + sums)


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


def _onward(items: tuple[Shared, ...]) -> Iterable[_Rectangle]:
    for item in items:
        yield item.bytes, 0, item.units[0], item.units[0] + 1, item.units[-1]


def dropped(units: int, items: Iterable[Saved]) -> Bytes:
    """Bytes that each range saves of these items, as `Tables.saved` counts them."""
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
