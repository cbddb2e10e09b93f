"""What an optimizer keeps in its attributes, beside `.state` and `.param_groups`.

    self.count += 1                        a number: a checkpoint has it, and --resume sets it
    self.slow[p].lerp_(p, 0.5)             a tensor: refused, since no plan knows how to cut it
    self.mean = losses.mean()              a tensor of one element is a number
    self.late[p] += 1; self.last.append()  numbers by parameter, or in a deque or an object: refused

Only what steps change is kept: the rest is as `optimizer(...)` makes it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import count, islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopipe.errors import CheckpointError
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_private import version
from autopipe.runtime.checkpoint.plain import like, plain

_ELSEWHERE = {"state", "param_groups", "defaults"}
"""Attributes that a checkpoint has by itself, or that never change."""

_CODE = (type, FunctionType, MethodType, ModuleType, nn.Module, Tensor)
"""Values in which no numbers are looked for; tensors are looked at by themselves."""

_MOST = 100_000
"""Numbers and words of an attribute that are looked at."""


class Attributes:
    """The attributes of a rank's optimizer, which is as `optimizer(...)` has made it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._numbers = dict(_numbers(optimizer))
        self._tensors = dict(_tensors(optimizer))
        self._others = dict(_others(optimizer))

    def changed(self) -> dict[str, Any]:
        """The numbers that steps have changed, as JSON data."""
        numbers = _numbers(self._optimizer)
        return {n: found for n, found in numbers if repr(found) != repr(self._numbers.get(n))}

    def check(self) -> None:
        """Refuse tensors, and numbers in what no checkpoint holds, that steps have changed.

        Raises:
            CheckpointError: names the attribute.
        """
        for name, kept in _others(self._optimizer):
            if kept != self._others.get(name):
                value = vars(self._optimizer)[name]
                raise CheckpointError(
                    f"{type(self._optimizer).__name__} keeps numbers in its attribute {name!r} "
                    f"({type(value).__name__}), and its steps change them: a checkpoint has those "
                    "in lists and in mappings by word, and a resumed run would go on without them",
                    hint="keep what belongs to a parameter in self.state[parameter]; or train "
                    "without --checkpoints (--save writes the model alone)",
                )
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
    given = _given(optimizer)
    for name, value in vars(optimizer).items():
        if name not in _ELSEWHERE and _is_plain(value, given):
            yield name, plain(value, name)


def _given(optimizer: Optimizer) -> set[int]:
    """The ids of the optimizer's parameters."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _is_plain(value: Any, given: Set[int]) -> bool:
    """Whether a value is JSON data, or a tensor of one element; ids of parameters are no keys."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.requires_grad
    if isinstance(value, Mapping):
        keys = all(isinstance(key, str | int) and key not in given for key in value)
        return keys and all(_is_plain(item, given) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(item, given) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _others(optimizer: Optimizer) -> Iterator[tuple[str, list[str]]]:
    """The attributes that are no JSON data, each with the numbers and words in it."""
    given = _given(optimizer)
    for name, value in vars(optimizer).items():
        if name not in _ELSEWHERE and not _is_plain(value, given):
            yield name, [*islice(_kept_in(value, ()), _MOST)]


def _kept_in(value: Any, above: Sequence[int]) -> Iterator[str]:
    """The numbers and words in a value as texts, and the places of random generators.

    Args:
        above: the ids of the values in which this one is.
    """
    if id(value) in above or isinstance(value, _CODE):
        return
    if isinstance(value, torch.Generator):
        yield value.get_state().numpy().tobytes().hex()
    elif isinstance(value, random.Random):
        yield repr(value.getstate())
    elif isinstance(value, np.random.Generator):
        yield repr(value.bit_generator.state)
    elif isinstance(value, np.ndarray):
        yield value.tobytes().hex()
    elif value is None or isinstance(value, bool | int | float | str | np.generic | count):
        yield repr(value)
    else:
        for part in _parts(value):
            yield from _kept_in(part, (*above, id(value)))


def _parts(value: Any) -> Iterator[Any]:
    """The entries of a container, or the attributes of an object."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from (key, item) if isinstance(key, str) else (item,)
    elif isinstance(value, list | tuple | deque):
        yield from value
    elif isinstance(value, Set):
        yield from sorted(map(repr, value))
    else:
        own = vars(value) if hasattr(value, "__dict__") else {}
        without = _ELSEWHERE if isinstance(value, Optimizer) else ()
        yield from (item for name, item in own.items() if name not in without)


def _tensors(optimizer: Optimizer) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """The attributes that hold other tensors than parameters, each as what a write changes."""
    given = _given(optimizer)
    for name, value in vars(optimizer).items():
        if name in _ELSEWHERE or _is_plain(value, given):
            continue
        held = [tensor for tensor in tensors_in(value) if id(tensor) not in given]
        if held:
            yield name, [(id(tensor), version(tensor)) for tensor in held]
