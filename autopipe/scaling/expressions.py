"""Formulas as plain data, for JSON and for a page's script.

    768 b s^2 + max(2 b s, 40)      ("+", ("*", 768, "b", ("^", "s", 2)), ("max", ..., 40))

A number, the name of a variable, or an operator and its operands: +, *, ^, max, min, floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Expression = float | str | tuple[Any, ...]

ROWS, TOKENS, BANDWIDTH = "b", "s", "w"
"""Variables: rows of a micro-batch, tokens of a row, bytes a second of the farthest link."""


def value(found: Expression, values: Mapping[str, float]) -> float:
    """The number that an expression gives for these values of its variables."""
    if isinstance(found, str):
        return values[found]
    if not isinstance(found, tuple):
        return found
    operator, *operands = found
    numbers = [value(operand, values) for operand in operands]
    if operator == "+":
        return math.fsum(numbers)
    if operator == "*":
        return math.prod(numbers)
    if operator == "^":
        return float(numbers[0] ** numbers[1])
    if operator == "floor":
        return math.floor(numbers[0])
    return max(numbers) if operator == "max" else min(numbers)


def total(*parts: Expression) -> Expression:
    """The sum of expressions; numbers among them are added up."""
    return _folded("+", parts, 0.0)


def product(*parts: Expression) -> Expression:
    """The product of expressions; numbers among them are multiplied."""
    return (
        0.0 if 0.0 in [p for p in parts if isinstance(p, float | int)] else _folded("*", parts, 1.0)
    )


def largest(*parts: Expression) -> Expression:
    """The largest of some expressions."""
    known = [part for part in parts if isinstance(part, float | int)]
    rest = [part for part in parts if not isinstance(part, float | int)]
    if not rest:
        return max(known)
    return ("max", *rest, *([max(known)] if known else []))


def _folded(operator: str, parts: tuple[Expression, ...], nothing: float) -> Expression:
    flat: list[Expression] = []
    for part in parts:
        flat += part[1:] if isinstance(part, tuple) and part[0] == operator else [part]
    known = [part for part in flat if isinstance(part, float | int)]
    rest = [part for part in flat if not isinstance(part, float | int)]
    number = math.fsum(known) if operator == "+" else math.prod(known)
    if not rest:
        return float(number)
    kept = [number, *rest] if number != nothing else rest
    return kept[0] if len(kept) == 1 else (operator, *kept)
