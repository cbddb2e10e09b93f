"""Make stand-ins of Python values, to compare: equal only if no code can tell the values apart;
and of parameters and the arguments of a call."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

INTERNAL = frozenset(vars(nn.Module())) | {"_is_full_backward_hook"}
"""What every module has in its `__dict__`."""

VALUES = (
    *(bool, int, str, bytes, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
FIXED = (type, FunctionType, BuiltinFunctionType, ModuleType)
"""Types whose values are compared by identity: using a function does not change it."""


def frozen(value: Any, *, deep: bool = True) -> Hashable:
    """A stand-in for a value; two are equal only if no code can tell the values apart.

    Args:
        deep: whether an object's attributes are looked at too.
    """
    if isinstance(value, VALUES):
        return type(value), value
    if isinstance(value, float | complex):
        return type(value), repr(value)  # 0.0 is not -0.0
    if isinstance(value, tuple | list):
        return type(value), tuple(frozen(item, deep=deep) for item in value)
    if isinstance(value, dict):
        items = [(frozen(k, deep=deep), frozen(v, deep=deep)) for k, v in value.items()]
        return type(value), tuple(items)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(frozen(item, deep=deep) for item in value)
    if type(value) is partial:
        parts = value.func, value.args, value.keywords, vars(value)
        return partial, *(frozen(part, deep=deep) for part in parts)
    if isinstance(value, FIXED) or not deep or isinstance(value, Tensor | nn.Module):
        return type(value), id(value)
    inside = getattr(value, "__dict__", None)
    return type(value), id(value), frozen(dict(inside), deep=False) if inside else None


NO_PARAMETERS: Mapping[int, int] = MappingProxyType({})


def numbered(parameters: Iterable[Tensor]) -> dict[int, int]:
    """The number of each parameter, by its identity: tells apart parameters of equal shapes."""
    return {id(parameter): number for number, parameter in enumerate(parameters)}


def plain_of(arg: Any) -> Any:
    """An argument with the names of classes in place of all values but numbers and texts."""
    if isinstance(arg, tuple | list):
        return [*map(plain_of, arg)]
    if isinstance(arg, dict):
        return {key: plain_of(value) for key, value in arg.items()}
    if isinstance(arg, slice):
        return [*map(plain_of, (arg.start, arg.stop, arg.step))]
    known = isinstance(arg, int | float | complex | str) or type(arg).__module__ == "numpy"
    return arg if known and not isinstance(arg, Tensor) else type(arg).__name__
