"""Trace Python's `min` and `max` of tensors as ops that give what eager does, and not as branches.

    min(self.decay, (1 + n) / (10 + n))     where(b < a, b, a)      of equals a, as Python has it
    total / max(mask.sum(), 1)              clamp(a, min=1)
    min(8, 64 * rows)                       8, for any number of rows

Python asks whether one value is less than the other: a branch that a later micro-batch may not take
(a decay that rises to its limit). torch.export replaces `min` and `max` by functions of its own
(`minimum`, which has another gradient where both are equal), and `math.pow` by one that returns a
tensor. The run that records reads has no such replacements; here both runs get the same ones.
"""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from autopipe.ir.torch_patches import is_torchs, patched

_BUILTINS = {"min": builtins.min, "max": builtins.max}
_POWER = math.pow


@contextmanager
def chosen_by_tensors() -> Iterator[None]:
    """Within, `min` and `max` of two tensors of one element, or of one and a number, are ops."""

    def extreme(name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 2 and not kwargs and any(isinstance(arg, _SIZES) for arg in args):
                asked = not is_torchs(sys._getframe(1))
                return _of_sizes(name, *args, otherwise, asked=asked)
            if not any(isinstance(arg, Tensor) for arg in args):
                return otherwise(*args, **kwargs)
            found = _chosen(name, *args) if len(args) == 2 and not kwargs else None
            return _BUILTINS[name](*args, **kwargs) if found is None else found

        return chosen

    def power(x: Any, y: Any) -> Any:
        tensors = isinstance(x, Tensor) or isinstance(y, Tensor)
        return _POWER(x, y) if tensors else otherwise(x, y)

    otherwise = math.pow
    with ExitStack() as until:
        for name in _BUILTINS:
            instead = extreme(name, getattr(builtins, name))
            until.enter_context(patched(builtins, name, instead))
        until.enter_context(patched(math, "pow", power))
        yield


_SIZES = torch.SymInt, torch.SymFloat


def _of_sizes(name: str, a: Any, b: Any, otherwise: Callable[..., Any], *, asked: bool) -> Any:
    """The argument that is the result for every number of rows from two on, if there is one.

    torch computes the stride of dims that a view merges so: `min(8, 64 * rows)` for experts before
    tokens. It does not find that this is 8, and would report a fixed number of rows.

    Args:
        asked: whether the model itself asks, to whose question one row may be another answer.
    """
    for first, second in ((a, b), (b, a)):
        least, most = (first, second) if name == "min" else (second, first)
        if statically_known_true(least <= most):
            if asked:
                bool(least <= most)  # `seeing_questions` sees it
            return first
    return otherwise(a, b)


def _chosen(name: str, a: Any, b: Any) -> Tensor | None:
    """The lesser or the greater of two values, the first if equal; None: leave it to Python."""
    given = [value for value in (a, b) if isinstance(value, Tensor)]
    tensor: Tensor = given[0]
    if any(t.numel() != 1 or t.dtype in (torch.bool, *_COMPLEX) for t in given):
        return None
    if len(given) == 1:
        number = b if tensor is a else a
        if not _as_exact(number, tensor):
            return None
        if tensor is a:
            limits = {"max" if name == "min" else "min": number}
            return torch.clamp(tensor, **limits)
        a = torch.full_like(tensor, number)
    if a.shape != b.shape or a.dtype != b.dtype:
        return None
    return torch.where(b < a if name == "min" else b > a, b, a)


_COMPLEX = (torch.complex64, torch.complex128)


def _as_exact(number: Any, beside: Tensor) -> bool:
    """Whether a number can stand for a tensor of this dtype in every later op."""
    if isinstance(number, bool) or beside.ndim:
        return False
    return isinstance(number, int) or (isinstance(number, float) and beside.is_floating_point())
