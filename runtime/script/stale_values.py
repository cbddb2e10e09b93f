"""Refuses to read parameters of a module that training has left behind, one by one.

    averaged.update_parameters(model)                        a mean of what training began with
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)        clips nothing: no gradient is there
    sum(p.norm() for p in model.parameters())                the norm before the first step

A rank trains a part or a copy of such a parameter, or another rank does. From the first step on it
is of a class whose values only this package reads. What it is may be asked (`p.shape`), and it may
be written: that is found before the next step (`copied`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.errors import ModelError

_ASKED = {
    *("size", "numel", "nelement", "dim", "ndimension", "element_size", "stride", "get_device"),
    *("storage_offset", "is_contiguous", "is_floating_point", "is_complex", "is_signed"),
    *("is_same_size", "requires_grad_", "__hash__", "__len__", "register_hook"),
    *("data_ptr", "untyped_storage", "is_shared", "is_pinned"),
}
"""Functions of a tensor that tell no value of it."""

_VALUES = {"real", "imag", "T", "H", "mT", "mH"}
"""Attributes of a tensor that do."""

_VIEWS = {"detach", "data"}
"""What gives the same values as another tensor, which may be written as well."""

_PASSING = "torch.optim", "torch.nn.modules"
"""Where gradients are looked for and passed over if there are none."""


_HERE = "autopipe.runtime.script.stale"
"""What the names of this file and of `stale` begin with, which copy for a user."""


class _Left:
    """A tensor whose values are not to be read."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = (func, types, args, kwargs or {})
        asked = getattr(getattr(func, "__self__", None), "__name__", "")
        # `super` is the tensor class that a subclass of this one names beside it
        name, result = getattr(func, "__name__", ""), super().__torch_function__  # type: ignore[misc]
        if within_package():
            return result(*call)
        if name == "__get__":
            if asked == "grad" and not next(_callers(), "").startswith(_PASSING):
                raise _error()
            if asked not in (_VALUES | _VIEWS):
                return result(*call)
        writes = name == "__set__" or (name.endswith("_") and not name.endswith("__"))
        if name in _ASKED or (writes and not _has((*args[1:], *(kwargs or {}).values()))):
            return result(*call)
        if name in _VIEWS or asked in _VIEWS:
            return result(*call).as_subclass(_LeftTensor)
        raise _error()


class _LeftParameter(_Left, nn.Parameter):
    """A parameter of a module that training has left behind."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain one, of a copied module which is to be loaded."""
        with torch.no_grad():
            values = _plain(self).clone()
        memo[id(self)] = copied = nn.Parameter(values, self.requires_grad)
        return copied


class _LeftTensor(_Left, Tensor):
    """A view of one."""


def _plain(parameter: nn.Parameter) -> Tensor:
    """Its values, without what refuses to read them."""
    # torch gives this function no types
    return nn.Parameter.__torch_function__(Tensor.detach, (), (parameter,), {})  # type: ignore[no-any-return, no-untyped-call]


def leave(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse reads of the values of these parameters from now on, but for those of a user's own
    class."""
    for one in parameters:
        if type(one) is nn.Parameter:
            one.__class__ = _LeftParameter


def free(parameters: Iterable[nn.Parameter]) -> None:
    """Let these parameters be read again."""
    for one in parameters:
        if type(one) is _LeftParameter:
            one.__class__ = nn.Parameter  # type: ignore[assignment]  # as it was before


def within_package() -> bool:
    """Whether the code that reads, or copies a module, is this package's."""
    passed_over = "copy", "torch"
    names = (name for name in _callers() if name.partition(".")[0] not in passed_over)
    return next(names, "").startswith("autopipe.")


def _has(values: Iterable[Any]) -> bool:
    """Whether one is among these values, or in a list of them."""
    return any(
        isinstance(one, _Left) or (isinstance(one, list | tuple) and _has(one)) for one in values
    )


def _callers() -> Iterator[str]:
    """The modules whose code runs, from the innermost on, without this one and without modes that
    pass a call on, as `torch.set_default_device` begins one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_HERE) and frame.f_code.co_name != "__torch_function__":
            yield name
        frame = frame.f_back


def _error() -> ModelError:
    return ModelError(
        "a parameter of the module itself was read after training has begun: this rank trains a "
        "part or a copy of it, or another rank does, and it is as it was before the first step",
        hint="pipe.named_parameters() are this rank's, for means of weights and for norms; "
        "pipe.clip_grad_norm_(1.0) clips; pipe.save('model.safetensors') writes the whole model",
    )
