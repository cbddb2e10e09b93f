"""Finds modes of torch around a step, and modules that a script switches, swaps or hooks before it.

    with torch.no_grad(): pipe.step(batch) no gradients
    with torch.autocast("cpu"): ...        another precision than the plan's
    model.bn.eval()                        plain PyTorch no longer writes its statistics
    model.act = nn.GELU()                  and computes with another activation
    model.body.register_forward_hook(f)    and calls the hook

A graph was traced from the modules as they were. Modes count as a step has them: one of a model
that is in evaluation mode as a whole was traced as after `.train()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopipe.errors import ModelError
from autopipe.runtime.script.between import MovedValue

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called"),
    *("_backward_hooks", "_backward_pre_hooks"),
)

_Look = Mapping[str, tuple[bool, Mapping[str, Any], Sequence[Any]]]
"""The mode of each module, the modules in it, and the hooks on it."""

_BEFORE = "do it before autopipe.plan and autopipe.parallelize, and leave it so"


class Switched:
    """Watches the modules of models.

    Args:
        models: as of `Between.models`: each with whether a file keeps it beside the one traced.
        modes: whether code of the models or the loss asks for a mode.
    """

    def __init__(self, models: Iterable[tuple[nn.Module, bool]], *, modes: bool) -> None:
        self._models, self._modes = [*models], modes
        self._began = [model.training for model, _ in self._models]
        self._looks = self._now()

    def check(self) -> None:
        """Refuse a model that was switched to evaluation as a whole.

        Raises:
            ModelError: it was in training mode when it was traced.
        """
        for (model, _), began in zip(self._models, self._began, strict=True):
            if self._modes and began and not model.training:
                raise ModelError(
                    "the model is in evaluation mode, and pipe.step trains it as it was traced, in "
                    "training mode: plain PyTorch would train it with dropout off and batch norm "
                    "by its statistics",
                    hint="call model.train() before the step; pipe.evaluate(batch) evaluates in "
                    "whatever mode the model is",
                )

    def moved(self) -> list[MovedValue]:
        """What has changed since the last call of this, or since this object was made."""
        before, self._looks = self._looks, self._now()
        return [
            MovedValue(name, model if kept else None, _BEFORE)
            for (model, kept), old, new in zip(self._models, before, self._looks, strict=True)
            for name in _changed(old, new, modes=self._modes)
        ]

    def _now(self) -> list[_Look]:
        return [_look(model) for model, _ in self._models]


def _look(model: nn.Module) -> _Look:
    as_trained = not model.training
    return {
        path: (
            as_trained or module.training,
            {**vars(module).get("_modules", {})},
            [hook for hooks in _HOOKS for hook in (vars(module).get(hooks) or {}).values()],
        )
        for path, module in model.named_modules()
    }


def _changed(old: _Look, new: _Look, *, modes: bool) -> Iterable[str]:
    """The names of what differs, of modules that are there before and after."""
    for path, (mode, modules, hooks) in new.items():
        if path not in old or new[path] == old[path]:
            continue
        mode_before, modules_before, hooks_before = old[path]
        if modes and mode != mode_before:
            yield f"{path}.training".strip(".")
        for name in modules.keys() | modules_before.keys():
            if modules.get(name) is not modules_before.get(name):
                yield f"{path}.{name}".strip(".")
        if hooks != hooks_before:
            yield f"hooks of {path or 'the model'}"


def check_around(call: str, precision: str, device: torch.device) -> None:
    """Look at the modes that a call of a pipe is made under.

    Args:
        call: `step` or `evaluate`, which needs no gradients.
        precision: the plan's, in which its bytes, transfers and compiled stages are.

    Raises:
        ModelError: gradients are off in a step, or autocast is on.
    """
    if call == "step" and not torch.is_grad_enabled():
        raise ModelError(
            "pipe.step was called under torch.no_grad() or inference_mode(): no gradients",
            hint="call it outside; pipe.evaluate(batch) gives the loss without gradients",
        )
    if torch.is_autocast_enabled(device.type):
        low = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        raise ModelError(
            f"pipe.{call} was called under torch.autocast to {low}, and the plan says in which "
            f"precision a step computes: {precision}",
            hint="call it outside; --precision bf16-autocast plans what torch.autocast does, and "
            "--precision bf16 keeps all of a step in bf16",
        )
