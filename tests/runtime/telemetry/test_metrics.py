"""The figures of a step: from the plan, from seconds and rows, and from all ranks."""

import math
from dataclasses import replace

import pytest

from autopipe.planfile.waterfall import mfu
from autopipe.runtime.telemetry.metrics import Metrics, of_step
from tests.support.plans import example_plan

PLAN = example_plan()


def test_a_step_as_predicted_has_the_predicted_mfu() -> None:
    step = PLAN.prediction.step_seconds
    found = of_step(PLAN, 1, 0.5, step, PLAN.batch.rows)
    assert found.mfu == mfu(PLAN)
    assert PLAN.work is not None
    assert found.tokens_per_second == pytest.approx(PLAN.work.tokens / step)
    assert found.rows_per_second == pytest.approx(PLAN.batch.rows / step)


def test_a_step_of_half_the_rows_computes_half() -> None:
    """The last batch of an epoch, say."""
    rows = PLAN.batch.rows
    whole, half = (of_step(PLAN, 1, 0.5, 2.0, n) for n in (rows, rows // 2))
    assert whole.mfu is not None and half.mfu is not None and rows % 2 == 0
    assert half.mfu == pytest.approx(whole.mfu / 2)
    assert half.tokens_per_second == pytest.approx((whole.tokens_per_second or 0) / 2)


def test_a_plan_that_does_not_know_its_work_has_no_mfu() -> None:
    found = of_step(replace(PLAN, work=None), 3, 0.5, 2.0, 8)
    assert found == Metrics(3, 0.5, 2.0, 4.0)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_no_number_is_left_out(loss: float) -> None:
    """JSON has no word for it."""
    assert Metrics(3, loss, 2.0, 4.0).known() == {"step": 3, "seconds": 2.0, "rows_per_second": 4.0}
