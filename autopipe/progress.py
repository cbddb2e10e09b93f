"""How far long work has come, for whoever shows it.

    with phase("measuring", of=12) as done:         some layer deep inside
        for figure in figures:
            measure(figure)
            done()

    with shown(Bars()):                             the door: the command line
        plan(...)

Without `shown` nobody listens, and a phase costs nothing. A phase may stand inside another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

Done = Callable[..., None]
"""`done()`: one more part of a phase is through; `done(3)`: three more."""


class Shows(Protocol):
    """What shows phases to a person."""

    def begin(self, name: str, of: int | None) -> Done:
        """A phase of `of` equal parts begins (None: nobody knows how many)."""

    def end(self, name: str) -> None:
        """The phase that began last is over."""


_SHOWS: ContextVar[Shows | None] = ContextVar("_SHOWS", default=None)


@contextmanager
def shown(by: Shows) -> Iterator[None]:
    """Whatever goes on in the block is shown by `by`."""
    token = _SHOWS.set(by)
    try:
        yield
    finally:
        _SHOWS.reset(token)


@contextmanager
def phase(name: str, of: int | None = None) -> Iterator[Done]:
    """Work that may take longer than two seconds; yields what is called after each part."""
    by = _SHOWS.get()
    if by is None:
        yield _nothing
        return
    done = by.begin(name, of)
    try:
        yield done
    finally:
        by.end(name)


def _nothing(parts: int = 1) -> None:
    """Nobody looks."""
