"""Find what a model counts in Python, and run the model with these counts far ahead.

How far is told by round numbers, and by the numbers that the code compares a count with:

    if self.step % 64 == 0: ...       after 62, 63 and 64 more calls, of one call before
    if 200 < self.step < 800: ...     after 198, 199, 200, 798, 799 and 800
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from autopipe.eager.assigned_buffers import as_before
from autopipe.eager.contents import (
    CONTAINERS,
    MOST,
    ahead,
    is_as,
    measure,
    put_back,
    raised,
    rise_of,
)
from autopipe.eager.holders import Part, holders_of
from autopipe.eager.second_run import Call
from autopipe.ir.torch_patches import is_torchs

T = TypeVar("T")

ROUND = 100, 1_000, 10_000
"""Counts that many phases and periods end at: a warm-up of 1000 calls, a penalty in every 100th."""

AHEAD = (*range(1, 9), 30, *(count - gap for count in ROUND for gap in (3, 2, 1)), 100_000)
"""The numbers of calls by which counts are set ahead: a warm-up may be over then, or a phase begun.
The model has been called one to three times before. A phase that begins and ends between two of
these numbers is seen if it depends on a number that the code compares the count with."""

MOST_PLACES = 40
"""The most numbers of calls that are tried besides `AHEAD`."""

MOST_STEPS = 10_000
"""The longest period that is looked for, in calls."""

FURTHER = 8
"""Further runs of a small model that keeps something which cannot be set ahead."""

SMALL = 500
"""The most calls of torch in one run of a small model."""


@dataclass(frozen=True)
class Asked:
    """A comparison of a count in the user's code.

    self.step + 1 > 800             shift 1, period 0, other 800
    self.step % 64 == 0             shift 0, period 64, other 0
    self.step in {100, 200}         other None: it was looked up in a set or a dict
    """

    shift: int
    period: int
    other: int | None

    def calls(self, count: int, rise: int) -> Iterator[int]:
        """The numbers of calls after which the comparison may have another result than now.

        After them the count is at the other number, one before it, or one behind it.

        Args:
            count: the count now.
            rise: what each call adds to it.
        """
        if self.other is None:
            return
        for target in (self.other - 1, self.other, self.other + 1):
            missing = target - self.shift - count
            if self.period:
                steps = range(1, min(self.period, MOST_STEPS) + 1)
                yield from [n for n in steps if (rise * n - missing) % self.period == 0][:1]
            elif missing % rise == 0:
                yield missing // rise


class Watched(int):
    """A count that notes what it is compared with, also behind an addition or as the rest of a
    division."""

    def __new__(
        cls, value: int, asked: set[Asked] | None = None, shift: int = 0, period: int = 0
    ) -> Watched:
        """A count of this value; `asked` receives what it is compared with."""
        made = super().__new__(cls, value)
        made.asked, made.shift, made.period = set() if asked is None else asked, shift, period
        return made

    asked: set[Asked]
    shift: int
    period: int

    def _note(self, other: object) -> None:
        if isinstance(other, int | float) and math.isfinite(other):
            self.asked.add(Asked(self.shift, self.period, math.ceil(other)))

    def _moved(self, result: Any, by: int) -> Any:
        if type(result) is not int or self.period:
            return result
        return Watched(result, self.asked, self.shift + by)

    def __add__(self, other: Any) -> Any:
        return self._moved(super().__add__(other), other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._moved(super().__sub__(other), -other if type(other) is int else 0)

    def __mod__(self, other: Any) -> Any:
        rest = super().__mod__(other)
        if type(other) is not int or other < 2 or self.period:
            return rest
        return Watched(rest, self.asked, self.shift, other)

    def __floordiv__(self, other: Any) -> Any:
        if type(other) is int and other > 1 and not self.period:
            self.asked.add(Asked(self.shift, other, 0))
        return super().__floordiv__(other)

    def __bool__(self) -> bool:
        self._note(0)
        return int(self) != 0

    def __eq__(self, other: object) -> Any:
        self._note(other)
        return super().__eq__(other)

    def __ne__(self, other: object) -> Any:
        self._note(other)
        return super().__ne__(other)

    def __lt__(self, other: Any) -> Any:
        self._note(other)
        return super().__lt__(other)

    def __le__(self, other: Any) -> Any:
        self._note(other)
        return super().__le__(other)

    def __gt__(self, other: Any) -> Any:
        self._note(other)
        return super().__gt__(other)

    def __ge__(self, other: Any) -> Any:
        self._note(other)
        return super().__ge__(other)

    def __hash__(self) -> int:
        """Note a lookup in a set or a dict, and the numbers of sets that the code spells out."""
        frame = sys._getframe(1)
        if not is_torchs(frame) and not frame.f_globals.get("__name__", "").startswith("autopipe."):
            self.asked.add(Asked(self.shift, self.period, None))
            for constant in frame.f_code.co_consts:
                for number in constant if type(constant) is frozenset else ():
                    self._note(number)
        return super().__hash__()


Calls = tuple[Call, ...]


class Counts:
    """The measures (`contents.measure`) of all values that models and losses keep.

    counts = Counts(model)      self.step = 3
    model(x)                    self.step = 4
    counts.ahead(1_000)         self.step = 1_004
    """

    def __init__(self, *parts: Part) -> None:
        self._holders = holders_of(*parts)
        self._before = self._now()
        self._lists = {
            (number, name): [*value]
            for number, holder in enumerate(self._holders)
            for name, value in holder.values().items()
            if type(value) in (list, deque)
        }
        self._rises: dict[tuple[int, Any], Any] | None = None
        self._fronts: dict[tuple[int, Any], bool] = {}

    def _now(self) -> dict[tuple[int, Any], Any]:
        return {
            (number, name): measured
            for number, holder in enumerate(self._holders)
            for name, value in holder.values().items()
            if (measured := measure(value)) is not None
        }

    @property
    def risen(self) -> bool:
        """Whether any measure has changed."""
        return any(self._before.get(key, value) != value for key, value in self._now().items())

    def ahead(self, calls: int) -> None:
        """Set each value that one call changed to what `calls` calls would have made of it.

        The change up to the first call of this method is taken for the change of one call.
        """
        for key, rise in self._risen_by().items():
            entries, name = self._holders[key[0]].entries, key[1]
            if rise is None or name not in entries:
                continue
            value = entries[name]
            if type(value) in (list, deque) and rise < 0:
                items, lost = self._lists[key], -rise * calls
                left = items[lost:] if self._fronts[key] else items[: max(0, len(items) - lost)]
                put_back(value, left)
            elif type(value) not in CONTAINERS or rise > 0:
                raised_value = raised(value, ahead(self._before[key], rise, calls))
                if raised_value is not value:
                    entries[name] = raised_value

    def _risen_by(self) -> dict[tuple[int, Any], Any]:
        """By how much each value has changed, when this is asked for the first time."""
        if self._rises is None:
            now, before = self._now(), self._before
            rises = {key: rise_of(before.get(key, value), value) for key, value in now.items()}
            self._rises = {k: rise for k, rise in rises.items() if before.get(k, now[k]) != now[k]}
            self._fronts = {key: self._loses_its_front(key) for key in self._lists.keys() & rises}
        return self._rises

    def places(self, run: Callable[[], object]) -> tuple[int, ...]:
        """The numbers of calls to try: `AHEAD`, and those by which a count reaches what the code
        compares it with; none if nothing has changed.

        Args:
            run: runs the model once, with counts that note it.
        """
        if not self.risen:
            return ()
        asked: dict[tuple[int, Any], set[Asked]] = {}
        for key, rise in self._risen_by().items():
            entries = self._holders[key[0]].entries
            if type(rise) is int and rise and type(entries.get(key[1])) is int:
                asked[key] = set()
                entries[key[1]] = Watched(entries[key[1]], asked[key])
        with suppress(Exception):  # whatever the user's code raises
            run() if asked else None
        for holder in self._holders:
            for name, value in holder.values().items():
                if type(value) is Watched:
                    holder.entries[name] = int(value)
        looked_up = [one for questions in asked.values() for one in questions if one.other is None]
        keys = self._integers() if looked_up else ()
        of_tables = {replace(one, other=key) for one in looked_up for key in keys}
        found = (
            calls
            for key, questions in asked.items()
            for question in questions | of_tables
            for calls in question.calls(self._before[key], self._risen_by()[key])
        )
        more = sorted({calls for calls in found if calls > 0} - {*AHEAD})
        return tuple(sorted({*AHEAD, *more[:MOST_PLACES]}))

    def _integers(self) -> list[int]:
        """The integers among the entries of sets and the keys of dicts that are kept."""
        kept = (value for holder in self._holders for value in holder.values().values())
        tables = [value for value in kept if type(value) in (dict, set, frozenset)]
        return [key for table in tables for key in [*table][:MOST] if type(key) is int]

    def runs(self, run: Callable[[], T]) -> Iterator[T | str]:
        """The results of runs with counts farther and farther ahead; none if nothing has changed.
        Of a run that fails the error's text: a table of the user's may be shorter."""
        for number in self.places(run):
            self.ahead(number)
            try:
                yield run()
            except Exception as error:  # whatever the user's code raises
                yield repr(error)

    def _loses_its_front(self, key: tuple[int, Any]) -> bool:
        """Whether a list has lost its first entries, as a schedule does by `pop(0)`."""
        now = [*self._holders[key[0]].entries[key[1]]]
        return is_as(now, self._lists[key][-len(now) :] if now else [])


def runs_ahead(
    parts: Sequence[Part],
    run: Callable[[], object],
    logged: Callable[[Callable[[], object]], Calls],
) -> tuple[Calls, Calls, list[Calls | str]]:
    """The calls of torch of a first run, of a second one, and of runs with counts far ahead or, of
    a small model that counts nothing, of a few more. Of a later run that fails its error's text.

    Each run begins with the same buffers but for caches, so that runs differ only by what the model
    keeps.

    Args:
        run: runs the model; it leaves the state of torch's generator as it was.
        logged: makes a run, and gives the calls that count.
    """

    def calls() -> Calls:
        with as_before(*parts):
            return logged(run)

    first = calls()
    counts = Counts(*parts)
    second = calls()
    more = FURTHER if not counts.risen and len(first) <= SMALL else 0
    return first, second, [*(calls() for _ in range(more)), *counts.runs(calls)]
