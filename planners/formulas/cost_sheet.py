"""Print a model's formulas for people: three digits, and no terms that do not matter.

blocks.0 to 5, each of 6: 7.1MB of parameters
  operations    768 b s² + 3.54M b s                   1.92k b s² + 7.08M b s
  bytes kept    24.6k b s
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import sympy

from autopipe.ir.graph import BATCH, SEQUENCE, Dim
from autopipe.planners.formulas.model_costs import Amounts, Formulas, ModelPart

LEAST = 1e-3
"""Terms below this share of a formula's value at one row of the longest sequence are left out."""

_NAMES = {BATCH: "b", SEQUENCE: "s"}
_POWERS = {1: "", 2: "²"}


def sheet(formulas: Formulas) -> str:
    """The lines of a micro-batch's costs, for each part and for the whole model."""
    length = formulas.longest or 1
    if formulas.longest is None:
        one_row, tokens = "one row", f"the sequence is no symbol: {formulas.why}"
    else:
        one_row, tokens = f"one row of {length} tokens", f"s: tokens of a row, up to {length}"
    left_out = f"left out: terms below {LEAST:.1%} of the value at {one_row}"
    lines = ["b: rows of a micro-batch", tokens, left_out, "", _line("", "forward", "backward")]
    for part in (*formulas.parts, ModelPart("the whole", 1, formulas.total)):
        lines += _lines(part, length)
    return "\n".join(lines)


def as_data(formulas: Formulas) -> dict[str, Any]:
    """The costs for a program to read: formulas in b and s as text in the syntax of Python."""
    rows = [{"name": p.name, "count": p.count, "each": _texts(p.each)} for p in formulas.parts]
    return {
        "longest": formulas.longest,
        "why_no_sequence": formulas.why or None,
        "parts": rows,
        "total": _texts(formulas.total),
    }


def _texts(amounts: Amounts) -> dict[str, str]:
    return {field.name: str(getattr(amounts, field.name)) for field in fields(amounts)}


def _lines(part: ModelPart, length: int) -> list[str]:
    each = part.each
    title = f"{part.name}, each of {part.count}" if part.count > 1 else part.name
    if each.parameters:
        title += f": {number(float(each.parameters))}B of parameters"
    rows = {
        "operations": (each.forward_flops, each.backward_flops),
        "bytes moved": (each.forward_bytes, each.backward_bytes),
        "bytes kept": (each.kept,),
        "bytes sent": (each.sent, each.sent_back),
    }
    return [title] + [
        _line(name, *(formula(dim, length) for dim in dims))
        for name, dims in rows.items()
        if any(dim != 0 for dim in dims)
    ]


def _line(name: str, forward: str, backward: str = "") -> str:
    return f"  {name:12} {forward:38} {backward}".rstrip()


def formula(dim: Dim, length: int) -> str:
    """`768 b s² + 3.54M b s`, without terms that do not matter for one row of `length` tokens."""
    expression = sympy.sympify(dim)
    if expression is sympy.nan:
        return "no formula"
    parts = sympy.Add.make_args(expression.expand())
    polynomial = sympy.Add(*(part for part in parts if part.is_polynomial(*_NAMES)))
    terms = [
        (abs(float(factor)) * length ** powers[1], _term(float(factor), powers))
        for powers, factor in sympy.Poly(polynomial, *_NAMES).terms()
    ]
    terms += [
        (abs(float(part.subs({BATCH: 1, SEQUENCE: length}))), str(part))
        for part in parts
        if not part.is_polynomial(*_NAMES)
    ]
    least = LEAST * sum(value for value, _ in terms)
    return " + ".join(text for value, text in terms if value > least) or "0"


def _term(factor: float, powers: tuple[int, ...]) -> str:
    symbols = [
        f"{name}{_POWERS.get(power, f'^{power}')}"
        for name, power in zip(_NAMES.values(), powers, strict=True)
        if power
    ]
    return " ".join(symbols if factor == 1 and symbols else [number(factor), *symbols])


def number(size: float) -> str:
    """Three digits and a letter for the thousands: 96, 8.19k, 405M, 1.2T."""
    letters = "kMGTP"
    power = 0
    while abs(size) >= 999.5 and power < len(letters):
        size, power = size / 1000, power + 1
    return f"{size:.3g}{letters[power - 1] if power else ''}"
