"""Finds modes of torch around a step, and modules that a script switches, swaps or hooks before it.

    with torch.no_grad(): pipe.step(batch) no gradients
    with torch.autocast("cpu"): ...        another precision than the plan's
    model.bn.eval()                        plain PyTorch no longer writes its statistics
    model.act = nn.GELU()                  and computes with another activation
    model.body.register_forward_hook(f)    and calls the hook
    torch.backends.cudnn.benchmark = True  where a loss asks for it

A graph was traced from the modules as they were. Modes count as a step has them: one of a model
that is in evaluation mode as a whole was traced as after `.train()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopipe.errors import ModelError
from autopipe.runtime.script.between import MovedValue

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called"),
    *("_backward_hooks", "_backward_pre_hooks"),
)

_FLAGS: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "argv": ("sys.argv", lambda: [*sys.argv]),
    "allow_tf32": ("torch.backends.cudnn.allow_tf32", lambda: torch.backends.cudnn.allow_tf32),
    "benchmark": ("torch.backends.cudnn.benchmark", lambda: torch.backends.cudnn.benchmark),
    "deterministic": (
        "torch.backends.cudnn.deterministic",
        lambda: torch.backends.cudnn.deterministic,
    ),
    **{
        name: (f"torch.{name}()", getattr(torch, name))
        for name in (
            *("are_deterministic_algorithms_enabled", "get_default_dtype"),
            *("get_float32_matmul_precision", "get_num_threads"),
        )
    },
}
"""By a name in code, what it reads of the process, in words, and a function that reads it."""

_BEFORE = "do it before autopipe.plan and autopipe.parallelize, and leave it so"


@dataclass(frozen=True)
class _Look:
    """A module as it was: its mode as a step has it, the modules in it, and the hooks on it."""

    path: str
    module: nn.Module
    mode: bool
    modules: Mapping[str, Any]
    hooks: Sequence[Any]

    def same(self, *, as_trained: bool) -> bool:
        """Whether it is so still."""
        module, own = self.module, vars(self.module)
        if (as_trained or module.training) is not self.mode or _hooks(own) != self.hooks:
            return False
        return bool(own.get("_modules", {}) == self.modules)


class Switched:
    """Watches the modules of models.

    Args:
        models: as of `Between.watched`: each with whether a file keeps it beside the one traced.
        names: those in code of the models and the loss, which may ask for a mode, or a flag.
    """

    def __init__(self, models: Iterable[tuple[nn.Module, bool]], names: Collection[str]) -> None:
        self._models, self._modes = [*models], "training" in names
        self._read = dict(flag for name, flag in _FLAGS.items() if name in names)
        self._flags = self._now()
        self._began = [model.training for model, _ in self._models]
        self._looks = [_look(model) for model, _ in self._models]

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
        before, self._flags = self._flags, self._now()
        changed = [words for words, flag in self._flags.items() if flag != before[words]]
        found = [MovedValue(words, None, _BEFORE) for words in changed]
        for number, (model, kept) in enumerate(self._models):
            looks, trained = self._looks[number], not model.training
            if all(look.same(as_trained=trained) for look in looks):
                continue
            self._looks[number] = _look(model)
            now = {look.path: look for look in self._looks[number]}
            pairs = [(old, now[old.path]) for old in looks if old.path in now]
            names = (name for pair in pairs for name in _changed(*pair, modes=self._modes))
            found += [MovedValue(name, model if kept else None, _BEFORE) for name in names]
        return found

    def _now(self) -> dict[str, Any]:
        return {words: _value(read) for words, read in self._read.items()}


def _value(read: Callable[[], Any]) -> Any:
    """What a flag is; None: torch does not say, as its older flags have no word for what a newer
    one has set (`torch.backends.fp32_precision`)."""
    try:
        return read()
    except RuntimeError:
        return None


def _look(model: nn.Module) -> list[_Look]:
    as_trained = not model.training
    return [
        _Look(
            path,
            module,
            as_trained or module.training,
            {**vars(module).get("_modules", {})},
            _hooks(vars(module)),
        )
        for path, module in model.named_modules()
    ]


def _hooks(own: Mapping[str, Any]) -> list[Any]:
    return [hook for hooks in _HOOKS if own.get(hooks) for hook in own[hooks].values()]


def _changed(old: _Look, new: _Look, *, modes: bool) -> Iterable[str]:
    """The names of what differs of a module, or in the place of one."""
    path = old.path
    if modes and new.mode != old.mode:
        yield f"{path}.training".strip(".")
    for name in dict.fromkeys((*old.modules, *new.modules)):
        if new.modules.get(name) is not old.modules.get(name):
            yield f"{path}.{name}".strip(".")
    if new.hooks != old.hooks:
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
