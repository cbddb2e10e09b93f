"""The path of the shortest step, where the seconds of paths hardly differ."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest

from autopipe.planners.search import descent
from autopipe.planners.search.descent import Arc, GroupsUsed, RangeCosts, StagePath


def ranges(**seconds: dict[tuple[int, int], float]) -> RangeCosts:
    """What some ranges of three units cost; there are no others."""
    arrays = {name: np.full((4, 4), np.inf) for name in ("seconds", "periods", "exposed", "beyond")}
    for name, of in seconds.items():
        for taken, amount in of.items():
            arrays[name][taken] = amount
    # The sets of recomputed blocks are not read where nothing runs again.
    return RangeCosts(**arrays, recomputed=np.zeros((4, 4), np.int64), sets=None)  # type: ignore[arg-type]


def test_steps_that_tie_but_for_a_tiny_sum_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 | 1 2 takes a second and 5e-10 of a sum that nothing hides, 0 1 | 2 a second and 3e-10.
    Bug: these tie, and the second was looked at again and again."""
    first = {(0, 1): 0.5, (0, 2): 0.5}
    last = {(1, 3): 0.5, (2, 3): 0.5 + 3e-10}
    none = dict.fromkeys(first, 0.0)
    states = [GroupsUsed((stage,), 0) for stage in range(3)]
    layers = [
        [Arc(*states[:2], 0, ranges(seconds=first, periods=first, exposed=none))],
        [
            Arc(
                *states[1:],
                1,
                ranges(seconds=last, periods=last, exposed={(1, 3): 5e-10, (2, 3): 0.0}),
            )
        ],
    ]
    looked, best_path = count(), descent.best_path

    def counted(*args: Any) -> StagePath:
        assert next(looked) < 20
        return best_path(*args)

    monkeypatch.setattr(descent, "best_path", counted)
    found = descent.fastest(layers, (1.0, 0.0), 0.0)
    assert found is not None and found.cuts == (1,)
