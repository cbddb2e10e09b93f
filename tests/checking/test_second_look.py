"""Rounding is told from a difference by a comparison in a wider dtype."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from autopipe.checking.compare import TensorRow
from autopipe.checking.comparison import Comparison
from autopipe.checking.second_look import (
    closer_look,
    may_be_hidden,
    may_be_rounding,
    second_look,
)
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
        (lambda: wrong_in_bf16(0.19), True),
        (lambda: wrong_in_bf16(0.5), False),
        (lambda: wrong_in_bf16(float("inf")), False),
        (lambda: wrong_in_bf16(0.19, what="loss"), False),
    ],
    ids=["off", "right", "missing", "16 bits", "far off", "missing in 16 bits", "the loss"],
)
def test_what_is_looked_at_twice(found: Callable[[], Comparison], may: bool) -> None:
    assert may_be_rounding(found()) == may


def in_bf16(off: float = 0.04) -> Comparison:
    """Of a compiled plan in bf16, whose gradients may be off by 0.1."""
    found = comparison(0.0, precision="bf16")
    return replace(found, rows=(replace(found.rows[0], off=off, allowed=0.1),))


def wrong_in_bf16(off: float, what: str = "gradients") -> Comparison:
    found = in_bf16(off)
    return replace(found, rows=(replace(found.rows[0], what=what, wrong=("layer.weight",)),))


def test_a_gradient_that_is_off_in_16_bits_alone_is_rounding() -> None:
    """Bug: a plan with tensor parallelism "differs", by 0.19 in the bias of a norm."""
    found = closer_look(wrong_in_bf16(0.19), lambda: comparison(1e-6))
    assert found.right
    assert found.notes == (
        "in bf16, gradients of step 1 are off by 0.19 of the largest entry of 'layer.weight', "
        "where rounding decides; what is below is in fp32",
    )
    wrong = wrong_in_bf16(0.19)
    assert closer_look(wrong, lambda: comparison(0.04)) is wrong


def test_what_is_wrong_in_fp32_is_wrong() -> None:
    found = closer_look(in_bf16(), lambda: comparison(0.04))
    assert not found.right
    assert found.plan.precision == "fp32"
    assert found.notes == ("in bf16 it is no more than rounding may do; this is in fp32",)


def test_what_is_right_in_fp32_too_is_told() -> None:
    found = closer_look(in_bf16(), lambda: comparison(1e-6))
    assert (found.right, found.plan.precision) == (True, "bf16")
    assert found.notes == (
        "in fp32, which allows 1e-05, it is the same: 0 of 2 tensors are equal bit by bit, the "
        "other 2 to rounding",
    )


def test_a_model_that_does_not_run_in_fp32_is_told() -> None:
    def refused() -> NoReturn:
        raise ModelError("mat1 and mat2 must have the same dtype")

    found = closer_look(in_bf16(), refused)
    assert found.notes == (
        "there is no closer look in fp32: mat1 and mat2 must have the same dtype",
    )
    failed = replace(comparison(0.0), rows=(), failure="the split model does not run (exit code 1)")
    assert "does not run" in closer_look(in_bf16(), lambda: failed).notes[0]


def test_what_is_looked_at_closer() -> None:
    """What rounding to 16 bits may hide, and nothing that is wrong, or equal bit by bit."""
    assert may_be_hidden(in_bf16())
    same = in_bf16(0.0)
    norm = replace(same.rows[0], what="clipped norm")
    assert not may_be_hidden(replace(same, rows=(replace(same.rows[0], equal=2), norm)))
    assert not may_be_hidden(comparison(1e-6))
    assert not may_be_hidden(comparison(0.04, precision="bf16"))
