"""Find what a model counts in Python, and run the model with these counts far ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

from autopipe.eager.assigned_buffers import as_before
from autopipe.eager.contents import (
    CONTAINERS,
    ahead,
    is_as,
    measure,
    put_back,
    raised,
    rise_of,
)
from autopipe.eager.holders import Part, holders_of
from autopipe.eager.second_run import Call, calls_of

T = TypeVar("T")

ROUND = 100, 1_000, 10_000
"""Counts that many phases and periods end at: a warm-up of 1000 calls, a penalty in every 100th."""

AHEAD = (*range(1, 9), 30, *(count - gap for count in ROUND for gap in (3, 2, 1)), 100_000)
"""The numbers of calls by which counts are set ahead: a warm-up may be over then, or a phase begun.
The model has been called one to three times before. A phase that begins and ends between two of
these numbers is not seen."""

FURTHER = 8
"""Further runs of a small model that keeps something which cannot be set ahead."""

SMALL = 500
"""The most calls of torch in one run of a small model."""


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
        """Set each value that has changed to what `calls` calls would have made of it.

        The change up to the first call of this method is taken for the change of one call.
        """
        if self._rises is None:
            now, before = self._now(), self._before
            rises = {key: rise_of(before.get(key, value), value) for key, value in now.items()}
            self._rises = {k: rise for k, rise in rises.items() if before.get(k, now[k]) != now[k]}
            self._fronts = {key: self._loses_its_front(key) for key in self._lists.keys() & rises}
        for key, rise in self._rises.items():
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

    def runs(self, run: Callable[[], T]) -> Iterator[T | str]:
        """The results of runs with counts farther and farther ahead; none if nothing has changed.
        Of a run that fails the error's text: a table of the user's may be shorter."""
        for number in AHEAD if self.risen else ():
            self.ahead(number)
            try:
                yield run()
            except Exception as error:  # whatever the user's code raises
                yield repr(error)

    def _loses_its_front(self, key: tuple[int, Any]) -> bool:
        """Whether a list has lost its first entries, as a schedule does by `pop(0)`."""
        now = [*self._holders[key[0]].entries[key[1]]]
        return is_as(now, self._lists[key][-len(now) :] if now else [])


def runs_ahead(parts: Sequence[Part], run: Callable[[], object]) -> Iterator[Hashable]:
    """The calls of torch of several runs: a first, a second, and then runs with counts far ahead
    or, of a small model that counts nothing, a few more.

    Each run begins with the same buffers, so that runs differ only by what Python keeps.

    Args:
        run: runs the model; it leaves the state of torch's generator as it was.
    """

    def calls() -> tuple[Call, ...]:
        with as_before(*parts):
            return calls_of(run)

    first = calls()
    yield first
    counts = Counts(*parts)
    yield calls()
    for _ in range(FURTHER) if not counts.risen and len(first) <= SMALL else ():
        yield calls()
    yield from counts.runs(calls)
