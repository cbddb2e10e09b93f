"""What modules are made of, as values that are equal only where nobody can tell them apart.

Of sibling modules with equal makes `tracing.same_modules` compares the calls. `restoring` puts back
what a module is made of after a run; `Counts` brings what it counts to where a long run does.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.frontend.assigned_buffers import as_before
from autopipe.ir.graph import tensors_in
from autopipe.ir.torch_private import buffer_names, is_fake, storage_key

INTERNAL = frozenset(vars(nn.Module())) | {"_is_full_backward_hook"}
"""What every module has in its `__dict__`."""

_HOOKS = tuple(name for name in sorted(INTERNAL) if name.endswith("hooks"))

VALUES = (
    *(bool, int, str, bytes, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
FIXED = (type, FunctionType, BuiltinFunctionType, ModuleType)
"""What is the same if it is the same object: nobody changes a function by using it."""


def alike_siblings(known: Mapping[str, Hashable]) -> dict[str, str]:
    """From the path of a module to that of the first sibling of which the same is known."""
    firsts: dict[Hashable, str] = {}
    alike: dict[str, str] = {}
    for path, what in known.items():
        first = firsts.setdefault((path.rpartition(".")[0], what), path)
        if first != path:
            alike[path] = first
    return alike


def candidates_of(model: nn.Module) -> dict[str, tuple[nn.Module, Hashable]]:
    """The outermost modules with parameters and submodules that have a sibling of the same make.

    By path, each with its make; none where one module has two places in the model.
    """
    if len(list(model.named_modules(remove_duplicate=False))) > len(list(model.modules())):
        return {}
    homes: dict[int, list[str]] = defaultdict(list)
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        homes[storage_key(tensor)].append(name)
    found: dict[str, tuple[nn.Module, Hashable]] = {}
    pending = [("", model)]
    while pending:
        prefix, parent = pending.pop()
        makes: dict[Hashable, list[tuple[str, nn.Module]]] = defaultdict(list)
        for name, child in parent.named_children():
            path = f"{prefix}{name}"
            make = _make(child, path, homes)
            makes[make].append((path, child))
        for make, members in makes.items():
            worth = any(True for _ in members[0][1].children()) and len(members) > 1
            if worth and any(True for _ in members[0][1].parameters()):
                found.update({path: (module, make) for path, module in members})
            else:
                pending += [(f"{path}.", module) for path, module in members]
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(path: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.split(".")]


def _make(module: nn.Module, path: str, homes: Mapping[int, list[str]]) -> Hashable:
    """What a module is made of, attributes aside; of one that is like no other a new object."""
    parts: list[Hashable] = []
    first: dict[int, str] = {}
    for name, inner in module.named_modules():
        if "forward" in vars(inner) or any(vars(inner).get(hooks) for hooks in _HOOKS):
            return object()
        parts.append((name, type(inner), inner.training))
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        key = storage_key(tensor)
        if not all(home.startswith(f"{path}.") for home in homes[key]):
            return object()
        same = first.setdefault(key, name)
        parts.append((name, same, type(tensor), look_of(tensor), tensor.requires_grad))
    return tuple(parts)


def look_of(tensor: Tensor) -> Hashable:
    where = tensor.storage_offset(), tensor.device, is_fake(tensor)
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, where


def modes() -> Hashable:
    """What is set around an op."""
    autocast = tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )
    return torch.is_grad_enabled(), autocast


def attributes_of(own: Mapping[str, Any]) -> Hashable:
    """The attributes that a module has of its own."""
    return tuple((name, frozen(v)) for name, v in own.items() if name not in INTERNAL)


def frozen(value: Any, *, deep: bool = True) -> Hashable:
    """A value that equals another's only if nobody can tell them apart."""
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


def namespaces_of(module: nn.Module) -> list[Mapping[str, Any]]:
    """Class attributes and globals of the code of a module and of all modules inside."""
    found: dict[Hashable, Mapping[str, Any]] = {}
    for kind in dict.fromkeys(type(inner) for inner in module.modules()):
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] not in ("torch", "builtins"):
                found[base] = vars(base)
                found[base.__module__] = vars(sys.modules.get(base.__module__, object))
    return list(found.values())


def plain_values(spaces: list[Mapping[str, Any]]) -> Hashable:
    """The numbers and texts in some namespaces, and how much is in their containers."""
    found: list[Hashable] = []
    for space in spaces:
        for name, value in space.items():
            if isinstance(value, bool | int | float | str):
                found.append((name, type(value), repr(value)))
            elif isinstance(value, list | dict | set):
                found.append((name, len(value)))
    return tuple(found)


@contextmanager
def restoring(*models: nn.Module) -> Iterator[Callable[[], tuple[str, ...]]]:
    """Restore the buffers, plain attributes, objects in them, and hooks of models after the block.

    What a model keeps from one call to the next is then as before its first; the hooks too that it
    registers in its first call, as it notes that it has done so.

    Yields:
        a function that gives the names of the plain attributes that have changed by now, or that
        hold an object which has.
    """
    with as_before(*models), _restoring_attributes(models) as changed:
        yield changed


@contextmanager
def _restoring_attributes(models: Sequence[nn.Module]) -> Iterator[Callable[[], tuple[str, ...]]]:
    """As `restoring` has it, of all but the values of buffers."""
    plain = {module: _plain_attributes(module) for model in models for module in model.modules()}
    objects = {id(value): value for known in plain.values() for value, _ in known.values()}
    held = {key: _held(value) for key, value in objects.items()}
    inside = {key: _with_copies(vars(objects[key])) for key in held if held[key] is not None}
    names = {module: buffer_names(module) for module in plain}
    empty = [(module, n) for module in plain for n in names[module] if getattr(module, n) is None]

    def changed() -> tuple[str, ...]:
        paths = {module: path for model in models for path, module in model.named_modules()}
        return tuple(
            f"{paths[module]}.{name}".strip(".")
            for module, known in plain.items()
            for name, value in vars(module).items()
            if name not in INTERNAL
            and (_differs(value, known.get(name)) or held.get(id(value)) != _held(value))
        )

    try:
        yield changed
    finally:
        for module, known in plain.items():
            for name in vars(module).keys() - known.keys() - INTERNAL:
                delattr(module, name)
            _put_back(vars(module), known)
        for key, items in inside.items():
            if _held(objects[key]) != held[key]:
                vars(objects[key]).clear()
                _put_back(vars(objects[key]), items)
        for module, registered in names.items():  # a first call may have registered some
            for name in buffer_names(module) - registered:
                delattr(module, name)
        for module, name in empty:
            setattr(module, name, None)


AHEAD = (10, 1_000, 100_000)
"""So many calls ahead a model is looked at that counts its calls: a warm-up may be over then."""


class Counts:
    """The numbers that modules, and objects in their attributes, keep now; and how long lists are.

    counts = Counts(model)      self.step = 3
    model(x)                    self.step = 4
    counts.ahead(1_000)         self.step = 1_004
    """

    def __init__(self, *models: nn.Module) -> None:
        modules = [module for model in models for module in model.modules()]
        inside = [v for module in modules for v in vars(module).values() if _held(v) is not None]
        self._spaces = [vars(holder) for holder in (*modules, *inside)]
        self._before = self._now()
        self._rises: dict[tuple[int, str], Any] | None = None

    def _now(self) -> dict[tuple[int, str], Any]:
        return {
            (number, name): len(value) if isinstance(value, list) else value
            for number, space in enumerate(self._spaces)
            for name, value in space.items()
            if name not in INTERNAL
            if type(value) in (int, float, list)  # a read of a trace is none of these
        }

    @property
    def risen(self) -> bool:
        """Whether any is another one by now."""
        return any(self._before.get(key, value) != value for key, value in self._now().items())

    def ahead(self, calls: int) -> None:
        """Set those that have changed to what so many calls would have made of them since then.

        What one call makes of them is what they are when this is called first.
        """
        if self._rises is None:
            now, before = self._now(), self._before
            self._rises = {k: v - before[k] for k, v in now.items() if before.get(k, v) != v}
        for (number, name), rise in self._rises.items():
            value = self._before[number, name] + calls * rise
            kept = self._spaces[number][name]
            if not isinstance(kept, list):
                self._spaces[number][name] = value
            elif rise > 0:
                kept[:] = kept[:value] + kept[-1:] * (value - len(kept))


def runs_ahead(models: Sequence[nn.Module], run: Callable[[], Hashable]) -> Iterator[Hashable]:
    """What a first run gives, what a second one does, and others far ahead if anything counts."""
    yield run()
    counts = Counts(*models)
    yield run()
    for calls in AHEAD if counts.risen else ():
        counts.ahead(calls)
        try:
            yield run()
        except Exception as error:  # a table of the user's may be shorter
            yield repr(error)


@contextmanager
def left_by(model: nn.Module, twins: Iterable[nn.Module]) -> Iterator[None]:
    """Within, the twins have the tensors that forward has left in attributes of the model.

    A loss finds there what a module computes beside its result (`self.aux_loss`); it may hold a
    twin, where the model that runs is a copy without weights.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    for twin in twins:
        own = dict(twin.named_modules())
        for path, module in model.named_modules() if twin is not model else ():
            for name, value in vars(module).items() if path in own else ():
                if name not in INTERNAL and any(True for _ in tensors_in(value)):
                    attributes = own[path].__dict__
                    before.append((attributes, name, attributes.get(name, _MISSING)))
                    attributes[name] = value
    try:
        yield
    finally:
        for attributes, name, value in reversed(before):  # one twin may be there twice
            attributes[name] = value
            if value is _MISSING:
                del attributes[name]


_MISSING = object()


def _differs(value: Any, known: tuple[Any, Any] | None) -> bool:
    """Whether an attribute is another one than `_plain_attributes` has noted."""
    if known is None or value is not known[0]:
        return known is None or frozen(value, deep=False) != frozen(known[0], deep=False)
    return known[1] is not None and len(value) != len(known[1])


def _held(value: Any) -> Hashable:
    """What an object of a user's class holds, such as a schedule with a count of its own."""
    others = (*VALUES, *FIXED, float, complex, tuple, list, dict, set, Tensor, nn.Module)
    inside = None if isinstance(value, others) else getattr(value, "__dict__", None)
    return frozen(dict(inside), deep=False) if inside else None


def _plain_attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A module's own attributes and hooks, as `_with_copies` gives them."""
    own = vars(module)
    wanted = [n for n in own if n not in INTERNAL or n == "training" or "hooks" in n]
    return _with_copies({name: own[name] for name in wanted})


def _with_copies(own: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Attributes, each with a copy if it is a list, a dict or a set."""
    contained = {n: copy(v) for n, v in own.items() if isinstance(v, list | dict | set)}
    return {name: (value, contained.get(name)) for name, value in own.items()}


def _put_back(own: dict[str, Any], known: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (value, before) in known.items():
        own[name] = value
        if isinstance(value, list):
            value[:] = before
        elif isinstance(value, dict | set):
            value.clear()
            value.update(before)
