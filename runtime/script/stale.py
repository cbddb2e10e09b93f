"""Refuses to call or to save a module of which this rank trains parts or copies.

    pipe.step(batch); optimizer.step()
    model(x)                                weights of other ranks, or all, as they began
    torch.save(model.state_dict(), file)    the same

Plain PyTorch has the trained ones there. `model.load_state_dict` puts them there.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from autopipe.errors import ModelError


class Stale:
    """Hooks on a module, which refuse its calls and its state_dict from the first step on.

    A copy of the module (`copy.deepcopy`) may be called and saved.
    """

    def __init__(self, model: nn.Module) -> None:
        self._trains = False
        model.register_forward_pre_hook(self._read)
        # torch gives these two no types
        model.register_state_dict_pre_hook(self._saved)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_post_hook(self._loaded)  # type: ignore[no-untyped-call]

    def note(self) -> None:
        """A step has run: from now on the module's weights are not the trained ones."""
        self._trains = True

    def _read(self, *_: object) -> None:
        if self._trains:
            raise _refusal()

    def _saved(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:  # with it, it gives the parameters themselves, as `parameters` does
            self._read()

    def _loaded(self, *_: object) -> None:
        self._trains = False

    def __deepcopy__(self, memo: object) -> Stale:
        """What a copy of the module has: hooks that do nothing."""
        return _of_copy()

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[[], Stale], tuple[()]]:
        """What a pickled module has: as a copy, but `torch.save(model)` is refused as a call is."""
        self._read()
        return _of_copy, ()


def _of_copy() -> Stale:
    return Stale(nn.Module())


def _refusal() -> ModelError:
    return ModelError(
        "the module itself was called or saved after training has begun: its weights are not those "
        "that are trained, of which this rank has parts or copies",
        hint="pipe.evaluate(batch, outputs=True) gives its outputs, and "
        "pipe.save('model.safetensors') writes it, for model.load_state_dict to read",
    )
