"""Run a model twice or more: does anything that it keeps make a later call compute otherwise?

kept values have changed    a second run, and runs with counts far ahead (`counts.runs_ahead`)
nothing has changed         a second run, for changes that cannot be seen
                            (`second_run.check_unseen`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from autopipe.eager.counts import runs_ahead
from autopipe.eager.holders import Part
from autopipe.eager.kept import Caches, restoring
from autopipe.eager.second_run import Noted, check_unseen

T = TypeVar("T")


def compared_runs(
    parts: Sequence[Part],
    first: Callable[[Noted], T],
    again: Callable[[Callable[[], Noted]], object],
    others: Callable[[], object],
) -> tuple[T, tuple[str, ...]]:
    """The result of a first run, and the names of kept values that make a later run differ.

    Args:
        parts: the model and its loss; what these runs change in them is put back.
        first: makes the first run, notes its calls of torch, and puts buffers back.
        again: makes another run in the same way.
        others: makes a run without noting anything or putting anything back.

    Raises:
        CaptureError: a second run makes other calls, though no kept value has changed.
    """
    with restoring(*parts) as changed:
        noted, caches = Noted(), Caches(*parts)
        found = first(noted)
        names = changed()
        if not names:
            check_unseen(noted.calls, again, filled=bool(caches.filled()))
    if not names:
        return found, ()
    with restoring(*parts):
        usual, *later = runs_ahead(parts, others)
    return found, names if any(other != usual for other in later) else ()
