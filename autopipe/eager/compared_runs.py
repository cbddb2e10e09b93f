"""Run a model a first time, and again: does it keep what makes its second call another one?

something changed that can be seen    a second run, and others far ahead (`counts.runs_ahead`)
nothing changed                       a second run all the same (`second_run.check_unseen`)
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
    """What a first run gives, and the names of what makes a second one another.

    Args:
        parts: the model and its loss; they keep nothing of these runs.
        first: the first run, whose calls of torch are to be noted; it puts buffers back.
        again: another one, in the same surroundings.
        others: a run without surroundings.

    Raises:
        CaptureError: a second run is another one, and nothing is seen to have changed.
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
        one, *more = runs_ahead(parts, others)
    return found, names if any(other != one for other in more) else ()
