"""Refuses to call, to save or to train again a module of which this rank trains parts or copies.

    pipe.step(batch); optimizer.step()
    model(x)                                weights of other ranks, or all, as they began
    torch.save(model.state_dict(), file)    the same
    autopipe.parallelize(model, other_plan) the same

Plain PyTorch has the trained ones there. `model.load_state_dict` puts them there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from autopipe.errors import ModelError
from autopipe.runtime.script import stale_values

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
            stale_values.leave(self._parameters(model))

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
            stale_values.free(self._parameters(model))

    def __deepcopy__(self, memo: dict[int, Any]) -> Stale:
        """What a copy of the module has: hooks that do nothing, or refuse what the copy lacks."""
        copied = _of_copy()
        found = memo.get(id(self._model()))
        if isinstance(found, nn.Module) and self._model() in _STALE:
            if not stale_values.within_package():  # which copies it to look at it, without values
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
