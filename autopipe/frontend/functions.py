"""Copies of functions that hold parts of a model, which `copy.deepcopy` takes as they are.

    layer.register_forward_hook(lambda m, a, out: out + self.scale)     a hook closes over the model
    old = layer.forward                                                 so does a forward that calls
    layer.forward = lambda x: old(2 * x)                                the one before
    def put(...): nonlocal gate; gate = out                             a variable of two functions

A copied model has copies of such functions, which hold its own parts; other values are shared. Two
copies have a variable in common if the functions have it in common.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn


class HeldFunctions:
    """The functions of a model that may hold parts of it.

    Args:
        memo: the memo of `copy.deepcopy`, in which copies of the functions are put.
    """

    def __init__(self, model: nn.Module, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._functions: dict[int, FunctionType] = {}
        for module in model.modules():
            self._look_in(vars(module).values())
        cells = {
            id(cell): CellType() for f in self._functions.values() for cell in f.__closure__ or ()
        }
        memo |= {
            number: _with_cells(
                function, tuple(cells[id(cell)] for cell in function.__closure__ or ())
            )
            for number, function in self._functions.items()
        }

    def close(self) -> None:
        """Put the copied parts into the copied functions, once the whole model is in the memo."""
        for number, function in self._functions.items():
            copied = cast(FunctionType, self._memo[number])
            for cell, old in zip(copied.__closure__ or (), function.__closure__ or (), strict=True):
                with suppress(ValueError):  # nothing in it yet
                    cell.cell_contents = self._copied(old.cell_contents)
            copied.__defaults__ = function.__defaults__ and tuple(
                map(self._copied, function.__defaults__)
            )

    def _look_in(self, values: Iterable[Any]) -> None:
        for value in values:
            for part in _parts(value):
                if isinstance(part, FunctionType) and id(part) not in self._functions:
                    if part.__closure__ or part.__defaults__:
                        self._functions[id(part)] = part
                        self._look_in([*_cells(part), *(part.__defaults__ or ())])

    def _copied(self, value: Any) -> Any:
        """The copy of a part of the model, or of a value that holds one; else the value itself."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, MethodType) and id(value.__self__) in self._memo:
            return MethodType(value.__func__, self._memo[id(value.__self__)])
        if isinstance(value, partial):
            args, named = map(self._copied, value.args), value.keywords.items()
            named_copies = {name: self._copied(argument) for name, argument in named}
            return partial(self._copied(value.func), *args, **named_copies)
        if type(value) in (list, tuple, dict) and any(id(p) in self._memo for p in _parts(value)):
            return self._with_copies(value)
        return _copy_or_itself(value, self._memo)

    def _with_copies(self, value: Any) -> Any:
        """A copy of a list, a tuple or a dict, with copies of its entries."""
        copied: Any = copy.copy(value)
        if isinstance(value, tuple):
            copied = tuple(map(self._copied, value))
        self._memo[id(value)] = copied  # before its entries, among which it may be itself
        if isinstance(value, dict):
            copied.update({key: self._copied(item) for key, item in value.items()})
        elif isinstance(value, list):
            copied[:] = map(self._copied, value)
        return copied


def _parts(value: Any) -> Iterator[Any]:
    """The values in a dict, a list or a tuple (hooks are in a dict); of anything else itself."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    else:
        yield value


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing in it yet
            yield cell.cell_contents


def _with_cells(function: FunctionType, cells: tuple[CellType, ...]) -> FunctionType:
    """A copy of a function that closes over these variables."""
    copied = FunctionType(
        function.__code__, function.__globals__, function.__name__, None, cells or None
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(vars(function))
    return copied


def _copy_or_itself(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of an iterator at its place, or of a hook's handle; anything else as it is."""
    if isinstance(value, torch.utils.hooks.RemovableHandle):
        return copy.deepcopy(value, memo)
    if isinstance(value, Iterator):
        with suppress(TypeError):  # a generator
            return copy.deepcopy(value)
    return value
