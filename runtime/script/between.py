"""Find values that a model's Python reads and that other code changes between its calls.

    model.tau = 0.5                 the user's loop, between two steps
    ANNEAL["beta"] = step / 1_000   `batches`, a scheduler, a hook of the optimizer

A graph keeps such a number as it was when the model was traced. The values are those of
`eager.holders` whose names occur in code that the model or its loss may run (a script also counts
its steps, which no model reads). Models that the user's file keeps (`HELD = [model]`) are watched
too: they need not be the one that was traced. So are the options of optimizers and schedules that
code names (`optimizer.param_groups[0]["lr"]`), which are made after the model, and `os.environ`.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import getattr_static
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe.eager.frozen import INTERNAL, frozen
from autopipe.eager.holders import Holder, Part, holders_of, is_users, modules_among
from autopipe.frontend.loss import named_by, used_by
from autopipe.frontend.user_lines import codes_in
from autopipe.ir.torch_private import version
from autopipe.runtime.script.copied import Sight, look_at_any

_GONE = object()

_BY_TEXT = frozenset({"getattr", "vars", "__dict__", "attrgetter"})
"""What reads attributes by names that are no names in code: `getattr(self, f"scale_{number}")`."""

_ENVIRONMENT = frozenset({"environ", "getenv"})
"""What reads the environment, by the names of variables that code has as texts."""

_OPTIONS = frozenset({"param_groups", "get_last_lr", "last_epoch", "_last_lr"})
"""What reads options of an optimizer, or of a schedule of them."""

_MUTABLE = set, deque, bytearray
"""Containers that are no holders of their own."""

_Buffers = dict[str, tuple[Tensor, int]]


@dataclass(frozen=True)
class MovedValue:
    """A value that has changed.

    Attributes:
        name: how the user finds it.
        model: the model, kept in the user's file, that has the value; None: no such model has it.
        hint: what to do instead.
    """

    name: str
    model: nn.Module | None
    hint: str = (
        "give what changes from step to step in the batch, as a tensor of no dims: "
        '{"x": x, "beta": torch.tensor(0.5)}; or count in a buffer that forward writes'
    )


class Between:
    """Watches the values that a model and its loss may read, between their calls.

    between = Between(model, loss)
    ANNEAL["beta"] = 0.5
    between.moved()                 my_model.ANNEAL; and nothing when asked once more

    Args:
        built: whether the model was built for the run, so that one of its class which a file keeps
            may be meant. A script's own module is itself, and others are others.

    Attributes:
        names: all that occur in code that the model or its loss may run.
        watched: the model, and others that the user's files keep, each with whether it is one.
    """

    def __init__(self, model: nn.Module, *parts: Part, built: bool = True) -> None:
        self.names = read = _read_by((model, *parts))
        own_names = _read_by((model, *parts), installed=False)
        self._by_text = not _BY_TEXT.isdisjoint(own_names)
        self._places = [
            _Place(holder, None if self._by_text and not holder.shared else read, None)
            for holder in holders_of(model, *parts)
        ]
        if not _ENVIRONMENT.isdisjoint(own_names):
            self._places.append(_Place(Holder("os.environ", os.environ), own_names, None))
        named = [place.holder for place in self._places]
        self._options = _Options(named, own_names) if own_names & _OPTIONS else None
        self._parts = parts
        kept_models = _kept_models(model, self._places) if built else []
        for kept in kept_models:
            own = None if self._by_text else read
            self._places += [_Place(holder, own, kept) for holder in _own_holders(kept)]
        self.watched = [(model, False), *((kept, True) for kept in kept_models)]
        self._buffers = self._buffers_now()

    @property
    def models(self) -> list[nn.Module]:
        """The model, and others that the user's files keep."""
        return [model for model, _ in self.watched]

    @property
    def others(self) -> list[nn.Module]:
        """Modules beside the model that the user's files keep, or that the loss uses."""
        own = set(self.watched[0][0].modules())
        kept = (value for place in self._places for value in list(place.holder.entries.values()))
        found = [*modules_among(self._parts), *(one for one in kept if isinstance(one, nn.Module))]
        return [module for module in dict.fromkeys(found) if module not in own]

    def moved(self) -> list[MovedValue]:
        """The values that have changed since the last call of this, or since it was made."""
        found = [moved for place in self._places for moved in place.moved()]
        found += self._options.moved() if self._options is not None else []
        return list(dict.fromkeys(found))

    def moved_buffers(self) -> list[MovedValue]:
        """Buffers that were replaced by another tensor since the last call of this; in models that
        the user's files keep also buffers that were written, since no run reads them."""
        before, self._buffers = self._buffers, self._buffers_now()
        return [
            MovedValue(name, model if kept else None)
            for (model, kept), old, new in zip(self.watched, before, self._buffers, strict=True)
            for name in new
            if not _as_before(name, old, new)
        ]

    def _buffers_now(self) -> list[_Buffers]:
        """Each model's buffers by name, for kept models with the number of writes."""
        return [
            {
                name: (buffer, version(buffer) if kept else 0)
                for name, buffer in model.named_buffers(remove_duplicate=False)
            }
            for model, kept in self.watched
        ]


def _as_before(name: str, old: _Buffers, new: _Buffers) -> bool:
    """Whether a buffer is the same tensor as before, and was not written since."""
    return name in old and new[name][0] is old[name][0] and new[name][1] == old[name][1]


class _Place:
    """A holder with its earlier values: those whose names are in `read`, the names in code; None:
    all of them."""

    def __init__(
        self, holder: Holder, read: frozenset[str] | None, model: nn.Module | None
    ) -> None:
        self.holder, self._model, self._read = holder, model, read
        if holder.inside and read and not read.isdisjoint(re.findall(r"\w+", holder.name)):
            self._read = None
        self._note()

    def moved(self) -> list[MovedValue]:
        entries = self.holder.entries
        if len(entries) == self._length and all(
            _same(entries.get(key, _GONE), value, at) for key, value, at in self._seen
        ):
            return []
        before = {key: (value, at) for key, value, at in self._seen}
        self._note()
        now = {key: value for key, value, _ in self._seen}
        keys = [
            key
            for key in dict.fromkeys((*before, *now))
            if not _same(now.get(key, _GONE), *before.get(key, (_GONE, None)))
        ]
        return [MovedValue(self.holder.label(key), self._model) for key in keys]

    def _note(self) -> None:
        entries = self.holder.entries
        self._length = len(entries)
        self._seen = [
            (key, value, _elements(value))
            for key, value in list(entries.items())
            if (self._read is None or key in self._read) and key not in INTERNAL
        ]


class _Options:
    """The options of optimizers and schedules that code names, whenever these are made.

    Args:
        holders: where code finds them.
        names: those in code.
    """

    def __init__(self, holders: Sequence[Holder], names: frozenset[str]) -> None:
        self._holders, self._names = holders, names
        self._seen = self._now()

    def moved(self) -> list[MovedValue]:
        """The options that have changed since the last call of this."""
        before, self._seen = self._seen, self._now()
        return [
            MovedValue(name, None)
            for name in dict.fromkeys((*before, *self._seen))
            if before.get(name) != self._seen.get(name)
        ]

    def _now(self) -> dict[str, Hashable]:
        found: dict[str, Hashable] = {}
        for holder in self._holders:
            for key, value in list(holder.entries.items()):
                if key not in self._names:
                    continue
                if isinstance(value, Optimizer):
                    for number, group in enumerate(value.param_groups):
                        at = f"{holder.label(key)}.param_groups[{number}]"
                        options = ((name, one) for name, one in group.items() if name != "params")
                        found |= {f"{at}[{name!r}]": _plain(one) for name, one in options}
                elif isinstance(value, LRScheduler):
                    kept = (n for n in ("_last_lr", "last_epoch") if n in vars(value))
                    found |= {f"{holder.label(key)}.{n}": _plain(vars(value)[n]) for n in kept}
        return found


def _plain(value: Any) -> Hashable:
    """A stand-in for a number, a tensor of one, or several of them."""
    return frozen(value.tolist() if isinstance(value, Tensor) else value, deep=False)


def _elements(value: Any) -> Sight | Hashable:
    """A look at the elements of a tensor, an array of numpy or a set; None: it has none."""
    if isinstance(value, Tensor):
        return look_at_any(value)
    if isinstance(value, _MUTABLE):
        return frozen(set(value) if isinstance(value, set) else list(value), deep=False)
    if type(value).__module__ != "numpy" or getattr(value, "dtype", None) is None:
        return None
    with suppress(TypeError, ValueError), warnings.catch_warnings(action="ignore"):
        return look_at_any(torch.as_tensor(value))  # in the same memory; not of texts or objects
    return None


def _same(value: Any, seen: Any, at: Sight | Hashable) -> bool:
    """Whether a value is the one seen before; of what has elements, whether these are."""
    if at is None:  # first, as it is of nearly all
        return value is seen or frozen(value, deep=False) == frozen(seen, deep=False)
    now = _elements(value)
    if isinstance(now, Sight) and isinstance(at, Sight):
        return now.alike(at)
    return type(value) is type(seen) and now == at


def _kept_models(model: nn.Module, places: Sequence[_Place]) -> list[nn.Module]:
    """Other models of the same class that the user's files keep."""
    found = (value for place in places for value in list(place.holder.entries.values()))
    same = (value for value in found if type(value) is type(model) and value is not model)
    return list(dict.fromkeys(same))


def _own_holders(model: nn.Module) -> list[Holder]:
    return [Holder(path, vars(module)) for path, module in model.named_modules()]


def _read_by(parts: Sequence[Part], *, installed: bool = True) -> frozenset[str]:
    """The names in the code of losses, of modules' classes and attributes, and of functions that
    these call; and the functions' own names.

    Args:
        installed: whether to look at the code of installed packages too.
    """
    modules = [m for model in modules_among(parts) for m in model.modules()]
    kinds = dict.fromkeys(base for module in modules for base in type(module).__mro__)
    own = (value for kind in kinds if kind is not nn.Module for value in vars(kind).values())
    attributes = (value for module in modules for value in list(vars(module).values()))
    pending = [
        *_functions((*own, *attributes)),
        *_functions(used for part in parts for used in used_by(part)),
    ]
    used = dict.fromkeys(
        one for f in pending for one in used_by(f) if isinstance(one, FunctionType)
    )
    objects = (one for part in parts for one in used_by(part) if not isinstance(one, nn.Module))
    used |= dict.fromkeys(_followed(used, map(type, objects)))
    if not installed:
        used = {one: None for one in used if "-packages" not in one.__code__.co_filename}
    own_names = (name for one in used for name in re.findall(r"\w+", one.__qualname__))
    codes = (code for function in used for code in codes_in(function.__code__))
    texts = (
        name
        for code in codes
        for name in (*code.co_names, *code.co_freevars, *code.co_consts)
        if isinstance(name, str)
    )
    return frozenset(("forward", *texts, *own_names))  # which torch calls


def _followed(functions: Iterable[FunctionType], kinds: Iterable[type]) -> Iterable[FunctionType]:
    """Functions of the user's files that others name, and methods of classes and objects that they
    name: `schedule.weight()`, `TRAINER.weight()`, a function in a cache. Other methods of a trainer
    count its steps.

    Args:
        kinds: the classes of losses that are objects, or whose methods are.
    """
    owners = [kind for kind in kinds if is_users(kind.__module__)]
    pending = [(f, owners) for f in functions if is_users(f.__module__)]
    pending += [(f, owners) for kind in owners for f in _methods(kind, {"__call__"})]
    seen = set[Any]()
    while pending:
        function, owners = pending.pop()
        if (key := (function.__code__, *owners)) in seen:
            continue
        seen.add(key)
        yield function
        names = {name for code in codes_in(function.__code__) for name in code.co_names}
        named = named_by(function)
        files = [one for one in named if isinstance(one, ModuleType) and is_users(one.__name__)]
        named += [vars(file)[name] for file in files for name in names if name in vars(file)]
        # Statically: an object may raise anything for an attribute that it has not.
        found = _functions([*named, *(getattr_static(one, "__wrapped__", None) for one in named)])
        pending += [(one, []) for one in found if is_users(one.__module__)]
        of_named = [one if isinstance(one, type) else type(one) for one in named]
        for kind in (*owners, *(kind for kind in of_named if is_users(kind.__module__))):
            pending += [(one, [kind]) for one in _methods(kind, names | {"__call__"})]


def _methods(kind: type, names: Collection[str]) -> list[FunctionType]:
    """The functions of these names of a class of the user's, and its bases'."""
    own = [vars(base) for base in kind.__mro__ if is_users(base.__module__)]
    return _functions(values[name] for values in own for name in names if name in values)


def _functions(values: Iterable[Any]) -> list[FunctionType]:
    """Functions, and the functions of methods and properties."""
    return [f for f in map(_function, values) if isinstance(f, FunctionType)]


def _function(value: Any) -> Any:
    """The function of a method or a property; else the value."""
    if isinstance(value, MethodType | staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value
