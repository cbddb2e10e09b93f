"""Twenty mistakes in the code that traces, lowers and runs: `check` finds each of them.

Planning compares a graph with its model too (`planners.driver.against_eager`); that net is taken
away here, so that what finds a mistake is the comparison of two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from autopipe.checking.check import check_model, check_plan
from autopipe.checking.comparison import Comparison
from autopipe.checking.fit import Degrees
from autopipe.frontend import model_file
from autopipe.planners.driver import against_eager, make_plan
from tests.support import warm
from tests.support.long import chosen
from tests.support.mutated import MUTATIONS, SETUPS

NOW = ("replicas that do not sum gradients",)
"""The others in the long run."""


def starting(folder: Path, mutation: str | None) -> Callable[[int, Sequence[str]], int]:
    """Starts ranks that have the mistake."""
    module = ["-m", "tests.support.mutated", mutation] if mutation else ["-m", "autopipe"]
    return lambda ranks, argv: warm.spawn(ranks, [*module, *argv], folder)


def checked(folder: Path, setup: str, mutation: str | None = None) -> Comparison:
    """The sample, checked in processes that all have the mistake, as the planner has."""
    how = SETUPS[setup]
    (folder / "sample.py").write_text(how.sample)
    start = starting(folder, mutation)
    degrees = Degrees(how.pp, how.dp, how.tp, chunks=1, micro_batches=4, rows=2)
    with (
        MUTATIONS[mutation][1]() if mutation else nullcontext(),
        patch.object(against_eager, "check"),
    ):
        return check_model(str(folder / "sample.py"), degrees, how.words, lambda line: None, start)


def test_there_are_twenty() -> None:
    assert len(MUTATIONS) >= 20


@pytest.mark.long
@pytest.mark.parametrize("setup", SETUPS)
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


@pytest.mark.long
def test_a_mistake_that_rounding_to_16_bits_hides_is_found(tmp_path: Path) -> None:
    """Of a compiled plan in bf16 a gradient may be off by 0.1, and this one's are by 0.01: `check`
    called it the same. It now looks at such a plan in fp32 too."""
    mistake = "a factor that is a little off"
    (tmp_path / "sample.py").write_text(SETUPS["pipeline"].sample)
    file = model_file.load(str(tmp_path / "sample.py"))
    with MUTATIONS[mistake][1](), patch.object(against_eager, "check"):
        plan = make_plan.plan(
            file.model, file.inputs, loss=file.loss, cluster="2xA100-40GB", batch_size=8,
            pp=2, micro_batches=4, schedule="1f1b", compile=True,
        )  # fmt: skip
        found, as_it_is = (
            check_plan(
                *(plan, str(tmp_path / "sample.py"), lambda line: None, precision),
                starting(tmp_path, mistake),
            )
            for precision in (None, "bf16")
        )
    assert (plan.precision, plan.compiled) == ("bf16", True)
    assert as_it_is.right
    assert not found.right
    assert found.plan.precision == "fp32"
    assert "in bf16 it is no more than rounding may do" in found.notes[-1]
