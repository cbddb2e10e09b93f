"""Refuses to call, to save, to train again or to read a module that training has left behind: of
which this rank trains parts or copies, or of which other ranks train the rest.

    pipe.step(batch); optimizer.step()
    model(x)                                weights of other ranks, or all, as they began
    torch.save(model.state_dict(), file)    the same
    autopipe.parallelize(model, other_plan) the same
    averaged.update_parameters(model)                        a mean of what training began with
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)        clips nothing: no gradient is there
    sum(p.norm() for p in model.parameters())                the norm before the first step

Plain PyTorch has the trained ones there. `model.load_state_dict` puts them there.

From the first step on such a parameter is of a class whose values only this package reads. What it
is may be asked (`p.shape`), and it may be written: that is found before the next step (`copied`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.errors import ModelError

_STALE: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules whose weights are not the trained ones."""


class Stale:
    """Hooks on a module, which refuse its calls and its state_dict from the first step on.

    A copy of the module (`copy.deepcopy`) that was made before may be called and saved; one made
    later has the same weights, and is refused as the module is.

    Args:
        left: the names of parameters that this rank holds others of, or none: they are not read.
    """

    def __init__(self, model: nn.Module, left: Collection[str] = ()) -> None:
        self._model, self._left = weakref.ref(model), frozenset(left)
        model.register_forward_pre_hook(self._read)
        # torch gives these two no types
        model.register_state_dict_pre_hook(self._saved)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_post_hook(self._loaded)  # type: ignore[no-untyped-call]

    def note(self) -> None:
        """A step has run: from now on the module's weights are not the trained ones."""
        model = self._model()
        if model is not None and model not in _STALE:
            _STALE.add(model)
            leave(self._parameters(model))

    def _parameters(self, model: nn.Module) -> list[nn.Parameter]:
        return [one for name, one in model.named_parameters() if name in self._left]

    def _read(self, *_: object) -> None:
        if (model := self._model()) is not None:
            check_fresh(model)

    def _saved(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:  # with it, it gives the parameters themselves, as `parameters` does
            self._read()

    def _loaded(self, model: nn.Module, keys: Any) -> None:
        if not keys.missing_keys:  # else some are those that it began with
            _STALE.discard(model)
            free(self._parameters(model))

    def __deepcopy__(self, memo: dict[int, Any]) -> Stale:
        """What a copy of the module has: hooks that do nothing, or refuse what the copy lacks."""
        copied = _of_copy()
        found = memo.get(id(self._model()))
        if isinstance(found, nn.Module) and self._model() in _STALE:
            if not within_package():  # which copies it to look at it, without values
                copied._model = weakref.ref(found)
                _STALE.add(found)
        return copied

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[[], Stale], tuple[()]]:
        """What a pickled module has: as a copy, but `torch.save(model)` is refused as a call is."""
        self._read()
        return _of_copy, ()


def _of_copy() -> Stale:
    return Stale(nn.Module())


def check_fresh(model: nn.Module) -> None:
    """Look at a module whose weights are about to be read.

    Raises:
        ModelError: this rank has trained parts or copies of them.
    """
    if model in _STALE:
        raise ModelError(
            "the module itself was called, saved or given to another pipe after training has "
            "begun: its weights are not those that are trained, of which this rank has parts or "
            "copies",
            hint="pipe.evaluate(batch, outputs=True) gives its outputs, and "
            "pipe.save('model.safetensors') writes it, for model.load_state_dict to read",
        )


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
"""This file's own name: its frames are passed over, since it copies for a user."""


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
