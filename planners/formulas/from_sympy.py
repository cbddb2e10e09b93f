"""A formula of sympy's as plain data (`scaling.expressions`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

from autopipe.errors import AutopipeError
from autopipe.scaling.expressions import Expression, product, total

_OPERATORS = {
    sympy.Add: "+",
    sympy.Mul: "*",
    sympy.Pow: "^",
    sympy.Max: "max",
    sympy.Min: "min",
    sympy.floor: "floor",
}


def of_sympy(formula: Any, names: Mapping[Any, str]) -> Expression:
    """A formula of sympy's as data.

    Args:
        names: the variable name of each symbol.

    Raises:
        AutopipeError: it has an unknown symbol or operator.
    """
    expression = sympy.sympify(formula)
    if expression in names:
        return names[expression]
    if expression.is_Number:
        return float(expression)
    operator = _OPERATORS.get(expression.func)
    if operator is None:
        raise AutopipeError(f"{expression} is no formula of sums, products and powers")
    parts = tuple(of_sympy(part, names) for part in expression.args)
    if operator in ("+", "*"):
        return total(*parts) if operator == "+" else product(*parts)
    return (operator, *parts)
