"""A tensor-parallel degree in the choice: its seconds are known first, its bytes if they matter.

    timed      Problem without bytes    how long a step takes at least
    whole      Problem, Draft           what a planner searches, and writes down

Bytes take runs of the model. A degree of which the least step is longer than two others' takes
none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from autopipe.aside import Aside, aside
from autopipe.degrees import as_first
from autopipe.draft import Draft
from autopipe.planners.answer import bounds
from autopipe.problem import Frame, Problem
from autopipe.profile import Costing, Profiled
from autopipe.progress import phase
from autopipe.stopwatch import Stopwatch


class Candidate:
    """One degree.

    Args:
        timed: its problem as far as seconds go.
        costing: its problem in the making.
        draft: what an answer to it is written down by.
        watch: gets the seconds that its bytes take.
    """

    def __init__(
        self,
        timed: Problem,
        costing: Costing,
        draft: Callable[[Profiled], Draft],
        watch: Stopwatch,
    ) -> None:
        self.timed = timed
        self._costing = costing
        self._draft = draft
        self._watch = watch
        self._ahead: Aside[Profiled] | None = None
        self._whole: tuple[Problem, Draft] | None = None

    def least(self) -> tuple[Frame, float]:
        """The frame whose step is bound to be the shortest, and its bound in seconds.

        Raises:
            InfeasibleError: the constraints contradict each other.
        """
        least = bounds(self.timed)
        return min(least.items(), key=lambda pair: pair[1])

    def look_ahead(self, *, check: bool = False) -> None:
        """Let its bytes be looked into aside: they may be asked for next.

        Args:
            check: as `Costing.profiled` has it.
        """
        if self._ahead is None and self._whole is None:
            self._ahead = aside(partial(self._profiled, check=check), self._costing.seconds)

    def whole(self, *, check: bool = False) -> tuple[Problem, Draft]:
        """The problem with its bytes, and what its answers are written down by.

        Args:
            check: as `look_ahead` has it, where that has not been called.
        """
        if self._whole is None:
            name = f"counting bytes, {self.timed.tp} tensor-parallel"
            with self._watch("costs"), phase(name):
                profiled = self._ahead.result if self._ahead else self._profiled(check=check)
                self._whole = profiled.problem, self._draft(profiled)
        return self._whole

    def _profiled(self, *, check: bool) -> Profiled:
        with as_first(self.timed.tp):
            return self._costing.profiled(check=check)
