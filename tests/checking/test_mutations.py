"""Twenty mistakes in the code that traces, lowers and runs: `check` finds each of them.

Planning compares a graph with its model too (`planners.driver.against_eager`); that net is taken
away here, so that what finds a mistake is the comparison of two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from autopipe.checking.check import check_model
from autopipe.checking.comparison import Comparison
from autopipe.checking.fit import Degrees
from autopipe.planners.driver import against_eager
from tests.support import warm
from tests.support.long import chosen
from tests.support.mutated import MUTATIONS, SETUPS

NOW = ("a lost buffer write",)
"""The others in the long run."""


def checked(folder: Path, setup: str, mutation: str | None = None) -> Comparison:
    """The sample, checked in processes that all have the mistake, as the planner has."""
    how = SETUPS[setup]
    (folder / "sample.py").write_text(how.sample)
    module = ["-m", "tests.support.mutated", mutation] if mutation else ["-m", "autopipe"]

    def start(ranks: int, argv: Sequence[str]) -> int:
        return warm.spawn(ranks, [*module, *argv], folder)

    degrees = Degrees(how.pp, how.dp, how.tp, chunks=1, micro_batches=4, rows=2)
    with (
        MUTATIONS[mutation][1]() if mutation else nullcontext(),
        patch.object(against_eager, "check"),
    ):
        return check_model(str(folder / "sample.py"), degrees, how.words, lambda line: None, start)


def test_there_are_twenty() -> None:
    assert len(MUTATIONS) >= 20


@pytest.mark.parametrize("setup", chosen(SETUPS, now=("pipeline",)))
def test_without_a_mistake_nothing_is_found(setup: str, tmp_path: Path) -> None:
    found = checked(tmp_path, setup)
    assert found.right, found.sentence
    assert {row.what for row in found.rows if row.tensors} == {
        "loss", "gradients", "clipped norm", "buffers", "parameters",
    }  # fmt: skip


@pytest.mark.parametrize("name", chosen(MUTATIONS, now=NOW))
def test_a_mistake_is_found(name: str, tmp_path: Path) -> None:
    found = checked(tmp_path, MUTATIONS[name][0], name)
    assert not found.right
    assert found.failure or found.first is not None
