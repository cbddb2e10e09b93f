"""Rounding that decides something is told from a difference by a comparison in fp64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from autopipe.checking.compare import TensorRow
from autopipe.checking.comparison import Comparison
from autopipe.checking.second_look import may_be_rounding, second_look
from autopipe.errors import ModelError
from tests.support.plans import example_plan


def comparison(off: float, **changes: Any) -> Comparison:
    """Of a compiled plan in fp32; `off` is that of a gradient whose limit is 1e-5."""
    wrong = ("layer.weight",) if off > 1e-5 else ()
    row = TensorRow(1, "gradients", 2, 0, off, "layer.weight", 1e-5, wrong)
    plan = replace(example_plan(), **{"precision": "fp32", "compiled": True, **changes})
    return Comparison(plan, (), (), (row,))


def test_what_is_wrong_in_fp64_too_is_wrong() -> None:
    found = comparison(0.04)
    assert second_look(found, lambda: comparison(0.05)) is found
    assert second_look(found, lambda: comparison(1e-6)) is found  # within fp32's limit, not fp64's


def test_a_model_that_does_not_run_in_fp64_stays_wrong() -> None:
    def refused() -> NoReturn:
        raise ModelError("mat1 and mat2 must have the same dtype")

    found = comparison(0.04)
    assert second_look(found, refused) is found


@pytest.mark.parametrize(
    ("found", "may"),
    [
        (lambda: comparison(0.04), True),
        (lambda: comparison(1e-7), False),
        (lambda: comparison(float("inf")), False),
        (lambda: comparison(0.04, precision="bf16"), False),
    ],
    ids=["off", "right", "missing", "16 bits"],
)
def test_what_is_looked_at_twice(found: Callable[[], Comparison], may: bool) -> None:
    assert may_be_rounding(found()) == may
