"""Whether two custom Functions of one name have the same code, and call the same around them.

    def made(bend):                             made(torch.sin) and made(torch.sin) are alike,
        class Bent(torch.autograd.Function):    made(torch.sin) and made(torch.cos) are not
            def forward(ctx, x): return bend(x)

A class that a function makes is another one in each of its calls, and so is that of a cell of a
notebook that runs again. Numbers and texts around it are in its op's text (`held_numbers`).
"""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

from autopipe.opaque.held_numbers import around


def alike(kind: type, other: type) -> bool:
    """Whether two classes of one name have the same forward and backward, as far as is known."""
    return kind is other or all(
        _same(inspect.unwrap(getattr(kind, name)), inspect.unwrap(getattr(other, name)), ())
        for name in ("forward", "setup_context", "backward")
    )


def _same(value: Any, other: Any, within: tuple[Any, ...]) -> bool:
    """Whether two values are no functions of unlike code.

    Args:
        within: the functions whose code reads `value`, which may be one of them.
    """
    if _name(type(value)) != _name(type(other)):
        return False
    if inspect.isbuiltin(value):
        return value is other
    if not inspect.isfunction(value) or value in within:
        return True
    mine, others = around(value), around(other)
    return (
        _steps(value.__code__) == _steps(other.__code__)
        and mine.keys() == others.keys()
        and all(_same(mine[name], others[name], (*within, value)) for name in mine)
    )


def _name(kind: type) -> tuple[str, str]:
    """What stays of a class that is made again."""
    return kind.__module__, kind.__qualname__


def _steps(code: CodeType) -> tuple[object, ...]:
    """What code does: all of it but where it stands, which may be another line now."""
    constants = [_steps(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, *constants, *names, code.co_flags, code.co_argcount
