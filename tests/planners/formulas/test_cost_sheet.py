"""Formulas for a person: what is shown of them, and how the page looks."""

import pytest
import sympy

from autopipe.ir.graph import BATCH as b
from autopipe.ir.graph import SEQUENCE as s
from autopipe.planners.formulas.cost_sheet import formula, number, sheet
from autopipe.planners.formulas.model_costs import Amounts, Formulas, ModelPart


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (96, "96"),
        (999.4, "999"),
        (999.6, "1k"),
        (8192, "8.19k"),
        (6.5e9, "6.5G"),
    ],
)
def test_three_digits(size: float, text: str) -> None:
    assert number(size) == text


@pytest.mark.parametrize(
    ("dim", "text"),
    [
        (0, "0"),
        (8192, "8.19k"),
        (768 * b * s**2 + 3542016 * b * s, "768 b s² + 3.54M b s"),
        (b * s + s, "b s + s"),
        (b * s**3, "b s^3"),
        (b / 4, "0.25 b"),
        (10**6 * b + 1, "1M b"),
        (s**2 + 10**6, "s² + 1M"),  # a term in s counts at the longest
        (sympy.Max(96, s), "Max(96, s)"),
        (64 * b * s + sympy.Max(96, s), "64 b s + Max(96, s)"),
        (10**6 * b * s + sympy.Max(96, s), "1M b s"),
        (b * sympy.floor(s / 3) + b, "b + b*floor(s/3)"),
        (sympy.nan, "no formula"),
    ],
)
def test_what_matters_of_a_formula(dim: sympy.Expr, text: str) -> None:
    assert formula(dim, 128) == text


def test_the_page() -> None:
    block = Amounts(
        parameters=7097856,
        forward_flops=768 * b * s**2 + 3542016 * b * s,
        backward_flops=1920 * b * s**2 + 7080960 * b * s,
        kept=24616 * b * s,
    )
    loss = Amounts(forward_flops=256 * b * s, sent=8 * b)
    parts = (ModelPart("blocks.0 to 5", 6, block), ModelPart("loss()", 1, loss))
    assert sheet(Formulas({}, parts, 128, "")) == (
        "b: rows of a micro-batch\n"
        "s: tokens of a row, up to 128\n"
        "left out: terms below 0.1% of the value at one row of 128 tokens\n"
        "\n"
        "               forward                                backward\n"
        "blocks.0 to 5, each of 6: 7.1MB of parameters\n"
        "  operations   768 b s² + 3.54M b s                   1.92k b s² + 7.08M b s\n"
        "  bytes kept   24.6k b s\n"
        "loss()\n"
        "  operations   256 b s                                0\n"
        "  bytes sent   8 b                                    0\n"
        "the whole: 42.6MB of parameters\n"
        "  operations   4.61k b s² + 21.3M b s                 11.5k b s² + 42.5M b s\n"
        "  bytes kept   148k b s\n"
        "  bytes sent   8 b                                    0"
    )


def test_a_page_without_a_sequence_says_why() -> None:
    page = sheet(Formulas({}, (ModelPart("head", 1, Amounts(kept=4 * b)),), None, "nobody has one"))
    assert page.splitlines()[1:3] == [
        "the sequence is no symbol: nobody has one",
        "left out: terms below 0.1% of the value at one row",
    ]
