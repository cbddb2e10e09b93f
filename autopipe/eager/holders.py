"""The places in Python where a model can keep a value from one call to the next.

self.step += 1                  attributes of a module, or of a user's object in an attribute
self.state["step"] += 1         entries of a dict, a list or a tuple in an attribute
Net.step += 1                   attributes of a class
global STEP; STEP += 1          globals of the file that defines a class
nonlocal step; step += 1        variables that a method closes over, attributes and defaults of
                                it; the same of a function in an attribute
STEP.set(STEP.get() + 1)        a context variable at any of these places, a threading.local
next(self.ids)                  an iterator at any of these places (`eager.iterators`)

What changes elsewhere (a clock, bytes) is found by a second run (`second_run.check_unseen`).
"""

from __future__ import annotations

import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from autopipe.eager import contents
from autopipe.eager.contents import MOST
from autopipe.eager.frozen import FIXED, INTERNAL, VALUES
from autopipe.eager.iterators import Rewindable
from autopipe.frontend.loss import used_by
from autopipe.frontend.user_lines import codes_in
from autopipe.ir.tensors import attributes_of

DEPTH = 5
"""Levels of objects, dicts and lists that are searched: `self.trainer.schedule.state["step"]`."""

_PLAIN = (*VALUES, float, complex)
_PASSED = (*_PLAIN, *FIXED, Tensor, nn.Module, property, staticmethod, classmethod)
"""Types of values that keep nothing, or that are searched by a function of their own."""

_OF_PYTHON = (Namespace, SimpleNamespace, WeakKeyDictionary)
"""Classes of Python's own whose objects keep values of the user's."""

_FOREIGN = frozenset({"torch", *sys.stdlib_module_names})
"""Packages in which users' models keep nothing."""

_MISSING = object()


@dataclass(frozen=True)
class Holder:
    """A place that keeps values by name: a module, a class, a file, a container.

    Attributes:
        name: how the user finds it: `layers.0`, `Net`, `my_models`; empty: the model itself.
        entries: a live view of its values: setting or deleting an entry changes the place itself.
        inside: whether `name` is that of a container, which its values have as their label too.
        shared: whether code other than the model's may keep values there too.
    """

    name: str
    entries: MutableMapping[Any, Any]
    inside: bool = False
    shared: bool = False

    def label(self, key: Any) -> str:
        """The name by which the user finds the value `key`."""
        return self.name if self.inside else f"{self.name}.{key}".strip(".")

    def values(self) -> dict[Any, Any]:
        """The values kept there now, except those of Python or torch itself."""
        if self.shared:
            return {key: v for key, v in self.entries.items() if _may_change(key, v)}
        if self.inside:
            return dict(self.entries)
        return {key: value for key, value in self.entries.items() if key not in INTERNAL}


Part = nn.Module | Callable[..., Any]
"""What a user hands over: a model, or a loss, which may be a function or an object."""


def modules_among(parts: Iterable[Part]) -> list[nn.Module]:
    """The modules among the parts, and modules that a loss uses (`frontend.loss.used_by`)."""
    found = (used for part in parts for used in used_by(part) if isinstance(used, nn.Module))
    return list(dict.fromkeys(found))


def weights_of(parts: Iterable[Part]) -> list[Tensor]:
    """The parameters of the models among the parts."""
    return [p for model in modules_among(parts) for p in model.parameters()]


def holders_of(*parts: Part) -> list[Holder]:
    """All holders of the parts: modules, their classes and files, and the values in these."""
    models = modules_among(parts)
    found = {key: of_part for model in models for key, of_part in _of_modules(model).items()}
    for part in parts:
        of_part = _of_modules(part) if isinstance(part, nn.Module) else _of_loss(part)
        found = {**of_part, **found}  # the model's names come first
    functions = [used for part in parts for used in used_by(part) if isinstance(used, FunctionType)]
    modules = [module for model in models for module in model.modules()]
    found |= _of_code(modules, functions)
    pending = [(holder, DEPTH) for holder in found.values()]
    while pending:
        holder, depth = pending.pop()
        below = {key: inner for key, inner in _below(holder).items() if key not in found}
        found |= below
        pending += [(inner, depth - 1) for inner in below.values()] if depth > 1 else []
    return list(found.values())


def _of_modules(model: nn.Module) -> dict[int, Holder]:
    """Holders of modules, and of parameters and buffers: `self.weight.calls += 1`."""
    states = chain(model.named_parameters(), model.named_buffers())
    of_states = {id(s): Holder(name, _Attributes(s, attributes_of)) for name, s in states}
    return {id(m): Holder(path, vars(m)) for path, m in model.named_modules()} | of_states


def _of_loss(loss: Callable[..., Any]) -> dict[int, Holder]:
    """Holders of a loss function, or of the object that is called or that has the method."""
    while isinstance(loss, partial):
        loss = loss.func
    target = getattr(loss, "__self__", loss)
    if isinstance(target, FunctionType):
        return _of_function(target)
    if isinstance(target, nn.Module):
        return _of_modules(target)
    state = getattr(target, "__dict__", None)
    return {id(state): Holder(type(target).__qualname__, state)} if isinstance(state, dict) else {}


def _of_code(modules: Sequence[nn.Module], used: Sequence[FunctionType]) -> dict[int, Holder]:
    """Holders of the modules' classes, of the files of code, and of the functions in both."""
    found: dict[int, Holder] = {}
    kinds = dict.fromkeys(base for module in modules for base in type(module).__mro__)
    files = {code.__module__ for code in (*used, *kinds) if not _foreign(code.__module__)}
    files |= _files_named([*used, *_functions_of(kinds)])
    for file in sorted(files & sys.modules.keys()):
        namespace = vars(sys.modules[file])
        found[id(namespace)] = Holder(file, namespace, shared=True)
        for value in list(namespace.values()):
            if isinstance(value, type | FunctionType) and value.__module__ == file:
                found |= _of_function(value)
                kinds |= {value: None} if isinstance(value, type) else {}
    for kind in kinds:
        if not _foreign(kind.__module__):
            found[id(kind)] = Holder(kind.__qualname__, _Attributes(kind, vars), shared=True)
            for value in list(vars(kind).values()):
                found |= _of_function(value)
    return found


def _functions_of(kinds: Iterable[type]) -> Iterator[FunctionType]:
    """The methods of classes."""
    values = (value for kind in kinds for value in list(vars(kind).values()))
    plain = (getattr(value, "__func__", value) for value in values)
    yield from (value for value in plain if isinstance(value, FunctionType))


def _files_named(functions: Sequence[FunctionType]) -> set[str]:
    """The user's other files that code refers to: `schedule.STEP`, `next_step()`, `COUNTER.tick()`.

    Files of installed packages are none of these: their caches and counts are their own matter.
    """
    pending, seen, files = [f for f in functions if is_users(f.__module__)], set[Any](), set[str]()
    while pending:
        function = pending.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = {name for code in codes_in(function.__code__) for name in code.co_names}
        named = [function.__globals__[name] for name in names if name in function.__globals__]
        of_files = [value for value in named if isinstance(value, ModuleType)]
        files |= {value.__name__ for value in of_files if is_users(value.__name__)}
        named += [vars(file)[name] for file in of_files for name in names if name in vars(file)]
        kinds = [value if isinstance(value, type) else type(value) for value in named]
        called = [value for value in named if isinstance(value, FunctionType)]
        called += _functions_of(kind for kind in kinds if is_users(kind.__module__))
        pending += [f for f in called if is_users(f.__module__)]
        files |= {one.__module__ for one in (*called, *kinds) if is_users(one.__module__)}
    return files


def is_users(file: str | None) -> bool:
    """Whether a file is the user's own, no installed package's."""
    path = getattr(sys.modules.get(file or ""), "__file__", None)
    installed = any(folder in str(path) for folder in ("site-packages", "dist-packages"))
    own = not _foreign(file or "") and (file or "").partition(".")[0] != "autopipe"
    return bool(path) and own and not installed


def _below(holder: Holder) -> dict[int, Holder]:
    """Holders of the functions, dicts, lists and objects that are values of a holder."""
    found: dict[int, Holder] = {}
    for key, value in holder.values().items():
        plain = type(value) is FunctionType and not holder.shared  # others' code is not run
        if plain and not _foreign(value.__module__ or ""):
            found |= _of_function(value)
        inside = _inside(value, shared=holder.shared)
        if inside is not None:
            found.setdefault(id(value), Holder(holder.label(key), inside, inside=True))
    return found


def _foreign(file: str) -> bool:
    return file.partition(".")[0] in _FOREIGN


def _may_change(key: Any, value: Any) -> bool:
    """Whether a model may count with an attribute of a class or a global of a file."""
    if str(key).startswith("__"):
        return False
    if isinstance(value, (list, dict, set)):
        return _is_plain(type(value))
    return isinstance(value, (*_PLAIN, Tensor)) or not isinstance(value, _PASSED)


_READ = frozenset("__getitem__ __iter__ __len__ __contains__ get keys values items".split())


def _is_plain(kind: type) -> bool:
    """Whether entries of a list, dict or set of a class are read as Python's own are, as those of
    `class Config(dict): __getattr__ = dict.__getitem__`. A library's may load files for it."""
    own = (base for base in kind.__mro__ if base.__module__ not in ("builtins", "collections"))
    return all(_READ.isdisjoint(vars(base)) for base in own)


def _of_function(value: Any) -> dict[int, Holder]:
    """Holders of a function: its attributes, the variables it closes over, its defaults."""
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if not isinstance(function, FunctionType):
        return {}
    name = function.__qualname__
    found = {id(function): Holder(name, vars(function), inside=True)}
    if function.__closure__:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        found[id(function.__closure__)] = Holder(name, _Cells(cells), inside=True)
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if (inside := _inside(default, shared=True)) is not None:
            found[id(default)] = Holder(name, inside, inside=True)
    return found


def _inside(value: Any, *, shared: bool) -> MutableMapping[Any, Any] | None:
    """The values in a dict, a list or an object; None: no model counts with them.

    Args:
        shared: whether the value is in a `shared` holder, beside objects such as a logger.
    """
    if isinstance(value, list | dict):
        if (shared and not _is_plain(type(value))) or len(value) > MOST:
            return None
        return contents.DictEntries(value) if isinstance(value, dict) else contents.ListItems(value)
    if isinstance(value, tuple):
        items = tuple.__getitem__(value, slice(None))  # a class may have no length of its own
        plain = len(items) > MOST or all(isinstance(item, _PLAIN) for item in items)
        return None if plain else contents.TupleItems(items)
    if isinstance(value, ContextVar):
        return contents.InContext(value)
    if isinstance(value, threading.local):
        return value.__dict__  # of this thread
    foreign = shared and _foreign(type(value).__module__) and not isinstance(value, _OF_PYTHON)
    if foreign or isinstance(value, (*_PASSED, set, frozenset, Rewindable)):
        return None
    slots = [
        name
        for base in type(value).__mro__
        for name in _several(vars(base).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__")
    ]
    plain = _field(value, "__dict__")
    if isinstance(plain, dict) and (plain or not slots):
        return plain
    return _Attributes(value, partial(_fields, names=slots)) if slots else None


def _several(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _fields(value: Any, names: Sequence[str]) -> dict[str, Any]:
    """The fields of these names that an object has."""
    return {name: one for name in names if (one := _field(value, name)) is not _MISSING}


def _field(value: Any, name: str) -> Any:
    """A field of an object, read without running its class's own code."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return _MISSING


class _Attributes(MutableMapping[Any, Any]):
    """Attributes that are set by `setattr`: of a class, a tensor, or an object with slots."""

    def __init__(self, target: Any, read: Callable[[Any], Any]) -> None:
        self._target, self._read = target, read

    def __getitem__(self, name: Any) -> Any:
        return self._read(self._target)[name]

    def __setitem__(self, name: Any, value: Any) -> None:
        setattr(self._target, name, value)

    def __delitem__(self, name: Any) -> None:
        delattr(self._target, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._read(self._target)))

    def __len__(self) -> int:
        return len(self._read(self._target))


class _Cells(MutableMapping[Any, Any]):
    """The variables that a function closes over."""

    def __init__(self, cells: dict[str, Any]) -> None:
        self._cells = cells

    def __getitem__(self, name: Any) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # not assigned yet
            return _MISSING

    def __setitem__(self, name: Any, value: Any) -> None:
        if value is not _MISSING:
            self._cells[name].cell_contents = value

    def __delitem__(self, name: Any) -> None:
        raise TypeError("a function closes over as many variables for good")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)
