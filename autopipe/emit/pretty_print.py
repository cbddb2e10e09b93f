"""Format expressions as Python text, in the layout of `ruff format`, and choose free names.

A statement that is too long for its line is opened at its brackets, outermost first:

    total = add(first, second)

    total = add(                total = add(
        first, second               first,
    )                               mul(second, third),
                                )
"""

from __future__ import annotations

import builtins
import json
import keyword
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

WIDTH = 88
"""Columns of a line: the default of ruff and black."""

STEP = 4
INDENT = 2 * STEP
"""Columns by which the body of a method is indented."""


@dataclass(frozen=True)
class Call:
    """`head(items)`. Without a head it is a tuple, or with other brackets a dict.

    A prefix of an expression (`name=`, `"key": `) is part of its head.
    """

    head: str
    items: tuple[Expression, ...]
    brackets: str = "()"

    @property
    def literal(self) -> bool:
        """Whether it is a tuple or a dict: opened, these have an item a line."""
        return self.brackets != "()" or not self.head or self.head.endswith(("=", ": "))


Expression: TypeAlias = str | Call


def behind(prefix: str, expression: Expression) -> Expression:
    """An expression with `name=` or `"key": ` in front."""
    if isinstance(expression, str):
        return prefix + expression
    return replace(expression, head=prefix + expression.head)


def flat(expression: Expression) -> str:
    """An expression on one line."""
    if isinstance(expression, str):
        return expression
    items = ", ".join(map(flat, expression.items))
    if expression.literal and expression.brackets == "()" and len(expression.items) == 1:
        items += ","
    return f"{expression.head}{expression.brackets[0]}{items}{expression.brackets[1]}"


def lay_out(expression: Expression, indent: int, before: str = "", after: str = "") -> list[str]:
    """The lines of `before expression after`, indented by `indent` columns."""
    margin = " " * indent
    line = f"{margin}{before}{flat(expression)}{after}"
    if len(line) <= WIDTH or isinstance(expression, str) or not expression.items:
        return [line]
    first = f"{margin}{before}{expression.head}{expression.brackets[0]}"
    if len(first) > WIDTH and before.endswith("= "):
        return [f"{margin}{before}(", *lay_out(expression, indent + STEP), f"{margin}){after}"]
    last = f"{margin}{expression.brackets[1]}{after}"
    deeper = indent + STEP
    body = " " * deeper + ", ".join(map(flat, expression.items))
    if len(body) <= WIDTH and not expression.literal:
        return [first, body, last]
    if len(expression.items) == 1 and not expression.literal:
        return [first, *lay_out(expression.items[0], deeper), last]
    return [first, *(line for e in expression.items for line in lay_out(e, deeper, "", ",")), last]


def text(value: str) -> str:
    """A string literal as ruff quotes it: in double quotes unless single quotes save escapes."""
    return (
        repr(value) if '"' in value and "'" not in value else json.dumps(value, ensure_ascii=False)
    )


def literal(value: object) -> Expression:
    """The source of a constant in a graph: a number, text, a dtype, or a tuple of these.

    A device becomes the name `DEVICE`, since the code may run on another one.
    """
    if isinstance(value, tuple | list):
        return Call("", tuple(map(literal, value)))
    if isinstance(value, str):
        return text(value)
    if isinstance(value, torch.device):
        return "DEVICE"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, float):
        return repr(value).replace("e+", "e")
    if isinstance(value, complex):
        return Call("complex", (literal(value.real), literal(value.imag)))
    return str(value)


def is_name(word: str) -> bool:
    """Whether a word is a valid name of an attribute or a keyword argument."""
    return word.isidentifier() and not keyword.iskeyword(word)


def identifier(path: str) -> str:
    """A path as a Python name: `h.0@1/add` -> `h_0_1_add`, `0` -> `x_0`."""
    name = "".join(c if c.isalnum() else "_" for c in path.replace("()", ""))
    return name if name and not name[0].isdigit() else f"x_{name}"


def member(path: str) -> str:
    """The expression that reads a path: `body.0.weight` -> `self.body["0"].weight`."""
    parts = [f".{part}" if is_name(part) else f"[{text(part)}]" for part in path.split(".")]
    return "self" + "".join(parts)


class Names:
    """The names in use, from which new, free names are derived."""

    def __init__(self, taken: Collection[str] = ()) -> None:
        self._taken = {"self", "aten", "torch", *taken}

    def new(self, wish: str) -> str:
        """The name `wish` if it is free, else a similar free name."""
        name = identifier(wish)
        if not is_name(name) or hasattr(builtins, name) or name in ("l", "O", "I"):
            name += "_0"
        free, number = name, 2
        while free in self._taken:
            free, number = f"{name}_{number}", number + 1
        self._taken.add(free)
        return free


def comment(words: str, indent: int) -> str:
    """A comment on one line, shortened if it is too long."""
    line = " " * indent + "# " + " ".join(words.split())
    return line if len(line) <= WIDTH else line[: WIDTH - 3].rstrip() + "..."


def table(rows: Sequence[Sequence[str]], indent: int) -> list[str]:
    """Rows of words, each column as wide as its widest word."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        " " * indent
        + "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
