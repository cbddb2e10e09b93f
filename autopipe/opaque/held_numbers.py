"""The numbers and texts that the code of a custom Function reads besides its arguments.

class Scale(torch.autograd.Function):       {"factor": 2.0, "config.mode": "fast"}
    factor = 2.0
    def forward(ctx, x): return x * Scale.factor if config.mode == "fast" else x

def made(bits):                             {"bits": 4}
    class Rounded(torch.autograd.Function):
        def forward(ctx, x): return (x * 2**bits).round() / 2**bits
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from torch import Tensor, nn

MOST_HELD = 16
"""Entries of a container that a Function may read as a setting; larger ones are tables."""


def held_by(kind: type) -> dict[str, Any]:
    """The numbers and texts that the code of a Function reads of its class, of its file, and of the
    function in which the class stands.

    A run reads them whenever it calls the Function; where a model changes them, its graph is that
    of one call.
    """
    found: dict[str, Any] = {}
    for method in ("forward", "setup_context", "backward"):
        code = inspect.unwrap(getattr(kind, method))
        if inspect.isfunction(code) and not code.__module__.startswith("torch."):
            names, enclosing = code.__code__.co_names, around(code)
            for name in (*names, *enclosing):
                value = enclosing.get(name, getattr(kind, name, code.__globals__.get(name)))
                inside = {} if isinstance(value, nn.Module | Tensor) else _fields(value)
                values = {name: value, **{f"{name}.{n}": inside[n] for n in names if n in inside}}
                found |= {label: held for label, held in values.items() if _is_number_or_text(held)}
    return dict(sorted(found.items()))


def around(code: Callable[..., Any]) -> dict[str, Any]:
    """The names that code reads of the function in which it stands, if they are assigned by now."""
    found: dict[str, Any] = {}
    names, cells = code.__code__.co_freevars, code.__closure__
    for name, cell in zip(names, cells or (), strict=True):
        with suppress(ValueError):  # the cell is empty: `__class__`, or what is assigned later
            found[name] = cell.cell_contents
    return found


def _fields(value: Any) -> Mapping[str, Any]:
    """The attributes of a module of Python's, a class or an object."""
    fields = getattr(value, "__dict__", None)
    return fields if isinstance(fields, Mapping) else {}


def _is_number_or_text(value: Any) -> bool:
    """Whether a value is one, or a small container of such values."""
    if type(value) in (list, tuple, set):
        return len(value) <= MOST_HELD and all(map(_is_number_or_text, value))
    if type(value) is dict:
        return len(value) <= MOST_HELD and all(map(_is_number_or_text, chain(*value.items())))
    return type(value) in (bool, int, float, str)
