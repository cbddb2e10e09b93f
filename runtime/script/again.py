"""Makes an optimizer like one of a script, of other parameters: to step it and see what it does.

Its class may take other arguments than it keeps, and keep what is no setting of a group
(`self.max_norm`). So it is copied, attribute by attribute, with the other parameters in the place
of its own and without their states.

    Prodigy(pipe.parameters())    another    Prodigy of two small matrices, before its first step
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopipe.errors import AutopipeError

_ATOMS = (
    *(NoneType, bool, int, float, complex, str, bytes, Enum, type, FunctionType),
    *(BuiltinFunctionType, torch.dtype, torch.device, torch.memory_format),
)

_HOOKS = "_optimizer_"
"""How the names of attributes begin in which torch keeps hooks: a script's may count steps."""


class NoOther(AutopipeError):
    """No other one can be made: the message says why, as a clause."""


def another(optimizer: Optimizer, instead: Mapping[int, nn.Parameter]) -> Optimizer:
    """An optimizer of the same class with the same settings and attributes, and without a state.

    Args:
        instead: the parameters that it steps, by the ids of those in whose place they are; it has
            none of the others.

    Raises:
        NoOther: it has an attribute that may have a state of its own.
    """
    return _Copy(instead).optimizer(optimizer)


class _Copy:
    """Copies values; each object once."""

    def __init__(self, instead: Mapping[int, nn.Parameter]) -> None:
        self._known: dict[int, Any] = dict(instead)
        self._groups: list[Sequence[nn.Parameter]] = []

    def optimizer(self, found: Optimizer) -> Optimizer:
        """An optimizer, which may be one that another has."""
        made: Optimizer = object.__new__(type(found))
        self._known[id(found)] = made
        self._groups += [group["params"] for group in found.param_groups]
        for name, value in vars(found).items():
            if name == "state":
                vars(made)[name] = defaultdict(dict)
            elif name == "param_groups":
                vars(made)[name] = [self._group(group) for group in value]
            elif name.startswith(_HOOKS):
                vars(made)[name] = OrderedDict()
            elif not hasattr(value, "_wrapped_by_lr_sched"):  # what a schedule has put over `step`
                if name == "step":
                    raise NoOther("its step was replaced")
                vars(made)[name] = self.of(value)
        return made

    def _group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        members = [self._known[id(one)] for one in group["params"] if id(one) in self._known]
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        return {"params": members, **self.of(settings)}

    def of(self, value: Any) -> Any:
        """A value of an attribute or a setting."""
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, Optimizer):
            return self.optimizer(value)
        if isinstance(value, _ATOMS) or isinstance(value, nn.Parameter):
            return value
        if isinstance(value, Tensor):
            return value.detach().clone()
        return self._container(value)

    def _like(self, kept: Tensor, parameter: nn.Parameter) -> Tensor:
        """What the other one keeps beside a parameter: a copy of it, or one number."""
        instead: nn.Parameter = self._known[id(parameter)]
        if torch.equal(kept, parameter):
            return instead.detach().clone()
        number = kept.flatten()[:1]
        if not bool((kept == number).all()):
            raise NoOther("it keeps a tensor for each parameter, with values of its own")
        return torch.zeros_like(instead) + number

    def _container(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, dict):
            made = defaultdict(value.default_factory) if isinstance(value, defaultdict) else kind()
            for key, one in value.items():
                beside = id(key) in self._known and _beside(one, key)
                made[self.of(key)] = self._like(one, key) if beside else self.of(one)
            return made
        for members in self._groups if kind in (list, tuple) else ():
            if len(value) == len(members) and all(map(_beside, value, members)):
                pairs = zip(value, members, strict=True)
                return kind(self._like(*pair) for pair in pairs if id(pair[1]) in self._known)
        if kind in (list, tuple, set, frozenset):
            return kind(self.of(one) for one in value)
        if kind is MethodType:
            return MethodType(value.__func__, self.of(value.__self__))
        if kind is partial:
            return partial(self.of(value.func), *self.of(value.args), **self.of(value.keywords))
        raise NoOther(f"it has a {kind.__name__}, which may have a state")


def _beside(kept: Any, parameter: Any) -> bool:
    """Whether a value is a tensor that an optimizer may keep for a parameter: the slow weights."""
    tensors = isinstance(kept, Tensor) and isinstance(parameter, Tensor)
    return tensors and not isinstance(kept, nn.Parameter) and kept.shape == parameter.shape
