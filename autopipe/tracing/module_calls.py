"""Log one call of a module in terms that equal for calls of two equal modules.

    begins   arguments, globals of the code          logged as (path in the module, looks, values)
    runs     attributes read, torch functions        logged with labels in the place of tensors
    ends     results; whether anything changed       `done`: equal to that of an equal call

By these logs `same_modules` decides which modules are alike, and by the calls around these modules
(`CallsAround`) whether it makes a difference to skip them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopipe.eager.frozen import FIXED, VALUES, frozen, plain_of
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_private import is_fake, no_function_modes, storage_key, version
from autopipe.opaque.calls.trees import NotPlain, distinct_tensors, parts_of, whole_of
from autopipe.tracing.capture.module_makes import (
    attributes_of,
    look_of,
    modes,
    namespaces_of,
    plain_values,
)

ABSENT = ("absent",)
"""Logged for an attribute that is not the module's own."""


class Doubt(Exception):
    """Raised for a value that cannot be compared: the module then equals no other."""


class ModuleCall:
    """The log of one call of a candidate (`module_makes.candidates_of`).

    Attributes:
        done: after the call, its log; an object that equals nothing if the log is in doubt.
        tree: the result, with slots for arguments and for new tensors; None: it has no tree.
        proved: whether the whole log of another call was equal.
        likely: earlier calls of siblings that found the same values when this one began.
    """

    done: Hashable = None
    tree: Any = None
    proved = False
    likely: Sequence[ModuleCall] = ()

    def __init__(self, module: nn.Module, args: Any) -> None:
        self.module = module
        self._log: list[Hashable] = []
        self._doubtful = False
        self._held: list[Tensor] = []  # a tensor that is gone would lend its id to another
        self._labels: dict[int, Hashable] = {}
        self._paths = {id(inner): path for path, inner in module.named_modules()}
        self._spaces = namespaces_of(module)
        states: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
        for name, tensor in states:
            self._hold(tensor, ("own", name))
        storages = {storage_key(tensor) for _, tensor in states}
        self._given = distinct_tensors(args)
        self._log.append(self._attempt(lambda: self._arguments(args, storages)))
        self._outside = storages | {storage_key(tensor) for tensor in self._held}
        self._versions = [version(tensor) for tensor in self._held]
        self._known = len(self._held)
        self._before = self._attempt(self._surroundings)
        self._log.append((self._attempt(lambda: plain_values(self._spaces)), modes()))
        self._read: dict[tuple[Hashable, str], Hashable] = {}
        self._made: list[Tensor] = []

    def doubt(self) -> None:
        """Mark the log as one that cannot be compared."""
        self._doubtful = True

    def _attempt(self, make: Callable[[], Hashable]) -> Hashable:
        try:
            return make()
        except Doubt:
            self._doubtful = True
            return None

    def _hold(self, tensor: Tensor, label: Hashable) -> None:
        if id(tensor) not in self._labels:
            self._labels[id(tensor)] = label
            self._held.append(tensor)

    def _arguments(self, args: Any, own_storages: set[int]) -> Hashable:
        storages: dict[int, int] = {}
        for number, tensor in enumerate(self._given):
            key = storage_key(tensor)
            if key in own_storages:
                raise Doubt
            place = storages.setdefault(key, number)
            self._hold(tensor, ("argument", number, place, look_of(tensor)))
        return self._labelled(args)

    def _surroundings(self) -> Hashable:
        """The attributes of all modules inside, and the globals of their code."""
        attributes = [
            (path, attributes_of(vars(inner))) for path, inner in self.module.named_modules()
        ]
        return (tuple(attributes), plain_values(self._spaces))

    def reads(
        self, module: nn.Module, attributes: dict[str, Any], name: str, namespace: Mapping[str, Any]
    ) -> None:
        """Log that code reads an attribute of some module."""
        whose = self._paths.get(id(module), id(module))
        if name == "__dict__" and str(namespace.get("__name__")).startswith("torch.nn.modules."):
            return
        value = self._attempt(lambda: _attribute(attributes, name))
        self._read[whose, name] = value
        if value is not ABSENT:
            self._log.append((whose, name, value))

    def calls(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Log the call of a torch function."""
        if self._doubtful:
            return

        def entry() -> Hashable:
            arguments = self._labelled((args, kwargs))
            for tensor in distinct_tensors(result):
                self._hold(tensor, (len(self._held), look_of(tensor)))
            return function, arguments, self._labelled(result), modes()

        self._log.append(self._attempt(entry))

    def _labelled(self, value: Any) -> Hashable:
        """A value with labels in the place of tensors."""
        if isinstance(value, Tensor):
            if id(value) not in self._labels:
                raise Doubt  # it comes from nowhere: a global, or kept from an earlier call
            return self._labels[id(value)]
        if isinstance(value, tuple | list):
            return type(value), tuple(self._labelled(item) for item in value)
        if isinstance(value, dict):
            return dict, tuple((key, self._labelled(item)) for key, item in value.items())
        if isinstance(value, slice):
            return slice, self._labelled((value.start, value.stop, value.step))
        found = frozen(value)
        if not isinstance(value, (*VALUES, *FIXED, float, complex)):
            raise Doubt
        return found

    def begins_like(self, other: ModuleCall) -> bool:
        """Whether this call, which has just begun, finds the same values that another has found."""
        if self._doubtful or self._log != other._log[: len(self._log)]:
            return False
        inside = {path: vars(module) for path, module in self.module.named_modules()}
        return all(
            whose in inside and _attribute(inside[whose], name) == value
            for (whose, name), value in other._read.items()
        )

    def results_like(self) -> list[Tensor] | None:
        """New fake tensors that look like those that this call made; None: that is impossible."""
        with torch.enable_grad():
            results = [_other_like(tensor) for tensor in self._made]
        if not all(map(is_fake, results)):
            return None
        alike = [*map(look_of, results)] == [*map(look_of, self._made)]
        return results if alike else None

    def take_over(self, other: ModuleCall, results: Sequence[Tensor]) -> Any:
        """Take over another call's log; returns its result with `results` as the new tensors."""
        self._log = other._log[:-1]
        for tensor, like in zip(results, other._made, strict=True):
            self._hold(tensor, other._labels[id(like)])
        return whole_of(other.tree, [*self._given, *results])

    def finish(self, output: Any) -> Hashable:
        """End the log; returns `done`."""
        self._log.append(self._attempt(lambda: self._results(output)))
        changed = any(
            version(tensor) != before
            for tensor, before in zip(self._held[: self._known], self._versions, strict=True)
        )
        if self._doubtful or changed or self._before != self._attempt(self._surroundings):
            self.done = object()
            return self.done
        with suppress(NotPlain):
            self.tree = parts_of(output, [*self._given, *self._made])
        self.done = tuple(self._log)
        return self.done

    def _results(self, output: Any) -> Hashable:
        arguments = {id(tensor) for tensor in self._held[: self._known]}
        self._made = [tensor for tensor in distinct_tensors(output) if id(tensor) not in arguments]
        keys = [storage_key(tensor) for tensor in self._made]
        if len(set(keys)) < len(keys) or not self._outside.isdisjoint(keys):
            raise Doubt
        return self._labelled(output)


def _attribute(attributes: Mapping[str, Any], name: str) -> Hashable:
    """An attribute of a module in a form that can be compared."""
    if name == "__dict__":
        return attributes_of(attributes)
    return frozen(attributes[name]) if name in attributes else ABSENT


def _other_like(tensor: Tensor) -> Tensor:
    """A new tensor without values that looks like this one, and is no leaf if it has a gradient."""
    like = tensor.detach().new_empty_strided(tensor.shape, tensor.stride())
    return like.requires_grad_().clone() if tensor.requires_grad else like


class CallsAround(TorchFunctionMode):
    """The calls of torch functions in a run, those in each of some parts and those around them.

    Args:
        where: gives the name of the part that runs; empty: none of them; None: what runs is no run
            of the model.
    """

    def __init__(self, where: Callable[[], str | None]) -> None:
        super().__init__()
        self._where = where
        self._calls: dict[str, list[Hashable]] = defaultdict(list)
        self._made: dict[int, tuple[weakref.ref[Tensor], Hashable]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where, kwargs = self._where(), kwargs or {}
        if where is None:
            return func(*args, **kwargs)
        with no_function_modes():  # to look at a tensor here is no call of the model's
            given = tuple(self._label(tensor) for tensor in tensors_in((args, kwargs)))
            numbers = repr(plain_of((args, kwargs)))  # before the call, which may write
        result = func(*args, **kwargs)
        with no_function_modes():
            made = distinct_tensors(result)
            if made or getattr(func, "__name__", "") != "__get__":
                self._calls[where].append((str(func), numbers, given))
                self._name(made, where, len(self._calls[where]))
            self.shown(func, args, kwargs, result)
        return result

    def shown(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Is called after each call, for others who watch."""

    def returned(self, where: str, output: Any) -> None:
        """Note what a part returns, whether it has run or was skipped."""
        self._name(distinct_tensors(output), where, "returned")

    def stands_for(self, copied: Tensor, tensor: Tensor) -> None:
        """Take a copy of a tensor for the tensor itself."""
        self._made[id(copied)] = weakref.ref(copied), self._label(tensor)

    def of_others(self, parts: Collection[str]) -> Mapping[str, Sequence[Hashable]]:
        """The calls, without those in these parts, as a value to compare."""
        return {part: calls for part, calls in self._calls.items() if part not in parts}

    @property
    def parts(self) -> Collection[str]:
        """The parts in which a function was called, the empty one for around them included."""
        return self._calls.keys()

    def _name(self, tensors: Sequence[Tensor], where: str, call: Hashable) -> None:
        for number, tensor in enumerate(tensors):
            self._made[id(tensor)] = weakref.ref(tensor), (where, call, number)

    def _label(self, tensor: Tensor) -> Hashable:
        """Where a tensor has come from; the looks of one that no call has made."""
        reference, label = self._made.get(id(tensor), (None, None))
        known = reference is not None and reference() is tensor
        return label if known else (tuple(tensor.shape), tensor.dtype)


class CallsAroundCandidates(CallsAround):
    """The calls in each candidate and around all of them; a running candidate is shown its own.

    Args:
        paths: the path of each candidate, by its id.
        running: gives the candidate's call that runs; None: none.
    """

    def __init__(self, paths: Mapping[int, str], running: Callable[[], ModuleCall | None]) -> None:
        super().__init__(self._path)
        self._paths, self._running = paths, running

    def _path(self) -> str:
        call = self._running()
        return "" if call is None else self._paths[id(call.module)]

    def shown(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Log a call in the candidate's call in which it was made."""
        call = self._running()
        if call is not None:
            if getattr(function, "__name__", "") in UNCERTAIN:
                call.doubt()
            call.calls(function, args, kwargs, result)


UNCERTAIN = frozenset(
    "__bool__ is_nonzero __contains__ equal allclose __int__ __index__ __float__ item tolist numpy "
    "tensor as_tensor asarray from_numpy frombuffer".split()
)
"""Functions that give Python a value, or make a constant of the graph from one."""
