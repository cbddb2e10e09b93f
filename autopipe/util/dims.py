"""Read the sizes in a plan: integers, or expressions in b (rows of a micro-batch) and s (tokens).

    7, "b", "12*b"          most sizes; a pattern reads them
    "b + 1", "b*s", ...     made of sympy's numbers, whose import takes half a second: a command
                            that only shows a plan avoids it

s is the number of tokens of a row (`tracing.symbolic_sequence`). Plans come from other people too:
of a text only arithmetic is read, and no part of it is executed, as `sympy.sympify` would.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from autopipe.errors import PlanError

if TYPE_CHECKING:
    import sympy

Entry = int | str
"""One size of a shape in a plan."""

_MULTIPLE = re.compile(r"(?:(\d+)\*)?b")


@cache
def symbols() -> tuple[sympy.Symbol, sympy.Symbol]:
    """The sympy symbols (b, s)."""
    import sympy

    rows, tokens = (sympy.Symbol(name, integer=True, positive=True) for name in "bs")
    return rows, tokens


def parse(entry: Entry) -> int | sympy.Expr:
    """Convert a plan's size to a graph's: an integer or a sympy expression.

    Raises:
        PlanError: the entry is no expression in b and s.
    """
    if isinstance(entry, int):
        return entry
    try:
        return _computed(ast.parse(entry.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise _refusal(entry) from error


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}

_FUNCTIONS = ("floor", "ceiling", "Mod", "Max", "Min", "Abs")
"""Functions of sympy's that a size may call."""

_HIGHEST = 64
"""The highest power in a size, of an expression in b or s: 9**9**9, or ((9**64)**64)**64, would not
be computed in a lifetime."""


def _computed(node: ast.expr) -> sympy.Expr:
    """The value of a parsed expression, of sympy's numbers.

    Raises:
        ValueError, TypeError, ArithmeticError: it is no arithmetic, or has no value.
    """
    import sympy

    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return sympy.sympify(number)
        case ast.Name(id="b" | "s" as name):
            return next(symbol for symbol in symbols() if symbol.name == name)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_computed(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            first, second = _computed(left), _computed(right)
            if not isinstance(op, ast.Pow) or (
                first.free_symbols and second.is_Integer and abs(second) <= _HIGHEST
            ):
                return _OPERATORS[type(op)](first, second)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return getattr(sympy, name)(*map(_computed, arguments))
    raise ValueError(f"{type(node).__name__} is no arithmetic")


def in_terms_of_sympy(size: sympy.Expr) -> sympy.Expr:
    """A size of torch's with sympy's own functions: torch has its own of `//` and `%`.

    A plan could write these, but neither read them nor compile a formula that has one. What is no
    whole number is no size (`x.shape[0] ** -0.5`): it keeps torch's, which compute as Python does.
    """
    import sympy

    known: dict[str, Callable[..., sympy.Expr]] = {
        "FloorDiv": lambda size, by: sympy.floor(size / by),
        "CleanDiv": lambda size, by: size / by,
        "Mod": sympy.Mod,
        "PythonMod": sympy.Mod,
        "ModularIndexing": lambda size, by, of: sympy.Mod(sympy.floor(size / by), of),
        "Max": sympy.Max,
        "Min": sympy.Min,
    }
    return size.replace(
        lambda part: part.func.__name__ in known,
        lambda part: known[part.func.__name__](*part.args),
    )


@lru_cache(maxsize=2**14)
def number_at(number: sympy.Basic, rows: int) -> bool | int | float:
    """The value of what Python has computed from the rows of a micro-batch: `1 / b`, `b > 2`."""
    found = number.subs(symbols()[0], rows)
    if found.is_Boolean:
        return bool(found)
    return int(found) if found.is_Integer else float(found)


def size_at(entry: Entry, rows: int) -> int:
    """The value of a size for micro-batches of `rows` rows.

    Raises:
        PlanError: the entry is no expression in b alone, or its value is no integer.
    """
    return elements_at((entry,), rows)


@lru_cache(maxsize=1024)  # every micro-batch of a step asks, and a text is read in .4 ms
def elements_at(shape: tuple[Entry, ...], rows: int) -> int:
    """The product of the sizes for `rows` rows; a single size may be a fraction, as `b/2`.

    Raises:
        PlanError: a size is no expression in b alone, or the product is no integer.
    """
    found: Any = 1
    for entry in shape:
        multiple = _MULTIPLE.fullmatch(entry) if isinstance(entry, str) else None
        if multiple is not None:
            found *= int(multiple[1] or 1) * rows
        elif isinstance(size := parse(entry), int):
            found *= size
        else:
            found *= size.subs(symbols()[0], rows)
    if not isinstance(found, int) and not found.is_Integer:
        written = shape[0] if len(shape) == 1 else shape
        raise _refusal(written, f" that is an integer at b = {rows}")
    return int(found)


def _refusal(entry: Entry | tuple[Entry, ...], further: str = "") -> PlanError:
    return PlanError(
        f"plan: the size {entry!r} is no expression in b, the rows of a micro-batch{further}",
        hint="write an integer or a multiple of the rows, such as '2*b'; or plan again",
    )
