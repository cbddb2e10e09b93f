"""Report the progress of long work to a display, if one is set.

    with phase("measuring", of=12) as done:         some layer deep inside
        for figure in figures:
            measure(figure)
            done()

    with shown(Bars()):                             the door: the command line
        plan(...)

Without `shown` there is no display, and a phase costs nothing. Phases may nest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

Say = Callable[[str], None]
"""A function that takes one line of text for the user; at the command line it writes to stderr."""

Done = Callable[..., None]
"""`done()`: one more part of a phase is finished; `done(3)`: three more."""


class Shows(Protocol):
    """A display of phases, such as bars on a terminal."""

    def begin(self, name: str, of: int | None) -> Done:
        """A phase of `of` equal parts begins; None: the number is unknown."""

    def end(self, name: str) -> None:
        """The phase that began last is over."""


_SHOWS: ContextVar[Shows | None] = ContextVar("_SHOWS", default=None)


@contextmanager
def shown(by: Shows) -> Iterator[None]:
    """Within, phases are shown on the display `by`."""
    token = _SHOWS.set(by)
    try:
        yield
    finally:
        _SHOWS.reset(token)


@contextmanager
def phase(name: str, of: int | None = None) -> Iterator[Done]:
    """A phase of work that may take over two seconds; yields a function to call after each part."""
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
    """Do nothing: there is no display."""
