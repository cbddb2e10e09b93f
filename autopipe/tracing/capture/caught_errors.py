"""Notice the errors that a trace alone raises, where the user's own code catches them.

    try:
        scale = float(h.std())      a trace's tensor has no values
    except Exception:
        scale = 1.0                 and a graph would have this, which the model never computes

Such an error is raised once more when forward ends, as if nothing had caught it. Those that the
model itself raises are caught as ever; torch only has to forget the call that they have ended.

    try:
        x = layer(x, lengths=n)     a TypeError, also without a trace
    except TypeError:
        x = layer(x)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_patches import patched
from autopipe.ir.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    no_function_modes,
)

_WITHOUT_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)

_OF_MEMORY = frozenset({"numpy", "__array__", "data_ptr", "storage", "untyped_storage"})
"""Functions that give memory, which a tensor of a trace has not."""

_OF_ANY_TENSOR = ("requires grad", "unsupported ScalarType")
"""What these functions say of a tensor with values, too."""


@contextmanager
def ended_calls_forgotten() -> Iterator[None]:
    """Within, a call of a module that ends with an error leaves nothing in the stack of calls that
    a trace keeps; torch takes it off behind a call that returns, and fails at the next one."""
    plain = torch.fx.Tracer.call_module

    def call_module(
        self: torch.fx.Tracer, module: nn.Module, forward: Any, args: Any, kwargs: Any
    ) -> Any:
        depth = len(self.module_stack)
        try:
            return plain(self, module, forward, args, kwargs)
        except BaseException:
            if len(self.module_stack) > depth:  # calls inside of it have been forgotten
                self.module_stack.popitem()
                self.num_calls[self.path_of_module(module)] -= 1
            raise

    with patched(torch.fx.Tracer, "call_module", call_module):
        yield


@contextmanager
def raised_at_the_end() -> Iterator[None]:
    """Within, errors that no run of the model as it is would raise are noted; of those that have
    been caught the first is raised at the end.

    To be entered last: calls of torch pass through it first.
    """
    noticing = _Noticing()
    before = _CURRENT.set(noticing)
    try:
        with noticing:
            yield
    finally:
        _CURRENT.reset(before)
    for error in noticing.noted:
        raise error


class _Noticing(TorchFunctionMode):
    """Notes the errors of calls of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Exception] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:  # whatever torch, or another mode, raises
            if _of_a_trace(error, getattr(func, "__name__", ""), args):
                self.noted.append(error)
            raise


_CURRENT = ContextVar[_Noticing | None]("noticing", default=None)


def noted(error: Exception) -> Exception:
    """The error, which is noted, too: for one that is raised outside of a call of torch."""
    noticing = _CURRENT.get()
    if noticing is not None:
        noticing.noted.append(error)
    return error


def _of_a_trace(error: Exception, name: str, args: Any) -> bool:
    if type(error).__module__.startswith("autopipe.") or isinstance(error, _WITHOUT_VALUES):
        return True
    if name not in _OF_MEMORY or any(words in str(error) for words in _OF_ANY_TENSOR):
        return False
    with no_function_modes():
        return any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors_in(args))
