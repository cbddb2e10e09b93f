"""What an optimizer keeps in its attributes, beside `.state` and `.param_groups`.

    self.count += 1                        a number: a checkpoint has it, and --resume sets it
    self.slow[p].lerp_(p, 0.5)             a tensor: refused, since no plan knows how to cut it
    self.mean = losses.mean()              a tensor of one element is a number

Only what steps change is kept: the rest is as `optimizer(...)` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from autopipe.errors import CheckpointError
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_private import version
from autopipe.runtime.checkpoint.plain import like, plain

_ELSEWHERE = {"state", "param_groups", "defaults"}
"""Attributes that a checkpoint has by itself, or that never change."""


class Attributes:
    """The attributes of a rank's optimizer, which is as `optimizer(...)` has made it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._numbers = dict(_numbers(optimizer))
        self._tensors = dict(_tensors(optimizer))

    def changed(self) -> dict[str, Any]:
        """The numbers that steps have changed, as JSON data."""
        numbers = _numbers(self._optimizer)
        return {n: found for n, found in numbers if repr(found) != repr(self._numbers.get(n))}

    def check(self) -> None:
        """Refuse tensors that steps have changed.

        Raises:
            CheckpointError: names the attribute.
        """
        for name, found in _tensors(self._optimizer):
            if found != self._tensors.get(name):
                raise CheckpointError(
                    f"{type(self._optimizer).__name__} keeps tensors in its attribute {name!r}, "
                    "and its steps change them: a checkpoint has those in its state alone, and a "
                    "resumed run would go on without them",
                    hint=f"keep each in self.state[parameter][{name!r}]; or train without "
                    "--checkpoints (--save writes the model alone)",
                )

    def restore(self, changed: Mapping[str, Any]) -> None:
        """Set the numbers that a checkpoint has."""
        for name, found in changed.items():
            present = vars(self._optimizer).get(name)
            if name in self._numbers or not hasattr(self._optimizer, name):
                setattr(self._optimizer, name, like(present, found))


def _numbers(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """The attributes that are numbers, words and containers of them, as JSON data."""
    for name, value in vars(optimizer).items():
        if name not in _ELSEWHERE and _is_plain(value):
            yield name, plain(value, name)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.requires_grad
    if isinstance(value, Mapping):
        keys = all(isinstance(key, str | int) for key in value)
        return keys and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _tensors(optimizer: Optimizer) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """The attributes that hold other tensors than parameters, each as what a write changes."""
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if name in _ELSEWHERE or _is_plain(value):
            continue
        held = [tensor for tensor in tensors_in(value) if id(tensor) not in given]
        if held:
            yield name, [(id(tensor), version(tensor)) for tensor in held]
