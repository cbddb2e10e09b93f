"""Solvers are timed in a process of their own."""

import gc

from benchmarks.planners.timing import timed

KNOWN: list[int] = []


def remember(number: int) -> int:
    KNOWN.append(number)
    return len(KNOWN)


def test_what_is_timed_starts_anew() -> None:
    """In a process that has this one's memory and leaves nothing in it."""
    remember(0)
    frozen = gc.get_freeze_count()
    found, seconds = timed(remember, 1)
    assert (found, KNOWN) == (2, [0])
    assert gc.get_freeze_count() == frozen, "the search for garbage is this process's own"
    assert seconds >= 0
