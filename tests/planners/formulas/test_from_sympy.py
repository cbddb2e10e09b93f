"""Formulas of sympy's as data: the same values, or refused."""

import pytest
import sympy

from autopipe.errors import AutopipeError
from autopipe.planners.formulas.from_sympy import of_sympy
from autopipe.scaling.expressions import value

b, s = sympy.symbols("b s", positive=True, integer=True)
NAMES = {b: "b", s: "s"}


@pytest.mark.parametrize(
    "formula",
    [
        768 * b * s**2 + 3 * b,
        sympy.Rational(1, 3) * b / (s + 2),
        sympy.floor(b * s / 7),
        sympy.Max(b, s) + sympy.Min(b, 3),
        sympy.Integer(5),
    ],
)
def test_a_formula_of_sympys_has_the_same_value(formula: sympy.Expr) -> None:
    found = of_sympy(formula, NAMES)
    for rows, tokens in ((1, 1), (3, 16), (8, 5)):
        meant = float(formula.subs({b: rows, s: tokens}))
        assert value(found, {"b": rows, "s": tokens}) == pytest.approx(meant, rel=1e-12)


def test_what_is_no_formula_of_rows_and_tokens_is_refused() -> None:
    for other in (sympy.Symbol("x") + b, sympy.sin(b)):
        with pytest.raises(AutopipeError, match="no formula of sums"):
            of_sympy(other, NAMES)
