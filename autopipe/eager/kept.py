"""Put back the values that a model has kept from one call to the next, or name them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from autopipe.eager.assigned_buffers import as_before, buffers_of
from autopipe.eager.contents import content_of, is_as, put_back
from autopipe.eager.frozen import INTERNAL, frozen
from autopipe.eager.holders import Holder, Part, holders_of, modules_among
from autopipe.eager.iterators import Rewindable, is_iterator
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_private import buffer_names, is_fake


@contextmanager
def restoring(*parts: Part) -> Iterator[Callable[[], tuple[str, ...]]]:
    """Restore after the block what models and losses keep: buffers, hooks, and all `holders_of`.

    Hooks that a model registers in its first call are removed too, since the attribute that says
    so is put back as well.

    Yields:
        a function that names the values, hooks and buffers that have changed or are new by now.
    """
    holders = holders_of(*parts)
    with (
        as_before(*parts, holders=holders, caches=True),
        _restoring_registered(modules_among(parts)) as registered,
        restoring_kept(holders) as kept,
    ):
        yield lambda: (*kept(), *registered())


class KeptNow:
    """The values of some holders as they are when this is made, with their contents."""

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._before = [(holder, _with_contents(holder.values())) for holder in holders]

    def changed(self) -> tuple[str, ...]:
        """The names of the values that have changed or are new since then."""
        return tuple(
            dict.fromkeys(
                holder.label(key)
                for holder, known in self._before
                for key, value in holder.values().items()
                if _differs(value, known.get(key))
            )
        )

    def changed_contents(self) -> tuple[str, ...]:
        """The names of the values that `put_contents_back` would change."""
        return tuple(
            holder.label(key)
            for holder, known in self._before
            for key, (value, content) in known.items()
            if holder.entries.get(key) is value and not is_as(value, content)
        )

    def put_back(self, holders: Sequence[Holder]) -> None:
        """Put back the values of some of the holders, and remove new ones."""
        for holder, known in self._of(holders):
            added = holder.values().keys() - known.keys()
            for key in sorted(added, reverse=True) if holder.inside else added:
                del holder.entries[key]
            _put_back(holder.entries, known)

    def put_contents_back(self, holders: Sequence[Holder]) -> None:
        """Put back what queues, arrays and bytes in some of the holders have held, if they are
        still the same objects."""
        for holder, known in self._of(holders):
            for key, (value, content) in known.items():
                if holder.entries.get(key) is value and not isinstance(value, Tensor):
                    put_back(value, content)

    def _of(self, holders: Sequence[Holder]) -> Iterator[tuple[Holder, _Known]]:
        asked = set(map(id, holders))
        return ((holder, known) for holder, known in self._before if id(holder) in asked)


_Known = Mapping[Any, tuple[Any, Any]]
"""A value and its content, by name."""


@contextmanager
def restoring_kept(holders: Sequence[Holder]) -> Iterator[Callable[[], tuple[str, ...]]]:
    """As `restoring`, of the values of these holders alone."""
    drawn = _drawn_from(holders)
    before = KeptNow(holders)
    try:
        yield before.changed
    finally:
        before.put_back(holders)
        for holder, key, watched in drawn:
            holder.entries[key] = watched.left()


@contextmanager
def caches_put_back(*parts: Part) -> Iterator[None]:
    """Within, functions may keep results by `functools.lru_cache`; afterwards the caches that have
    grown are empty.

    So a graph makes the table of a cached function itself, and does not have it as a constant: a
    rank, which has not called the model before, makes it too. Caches that forward does not use
    stay as they are.
    """
    caches = Caches(*parts)
    try:
        yield
    finally:
        for function in caches.filled():
            function.cache_clear()


class Caches:
    """The cached functions that a model may call, with the number of results each has now."""

    def __init__(self, *parts: Part) -> None:
        values = (value for holder in holders_of(*parts) for value in holder.values().values())
        functions = [value for value in values if isinstance(value, _Cached)]
        self._sizes = [(function, function.cache_info().currsize) for function in functions]

    def filled(self) -> list[Any]:
        """The functions whose number of results has changed."""
        return [f for f, size in self._sizes if f.cache_info().currsize != size]


_Cached = type(lru_cache(int))
"""The class of what `functools.lru_cache` and `functools.cache` make."""


def _drawn_from(holders: Sequence[Holder]) -> list[tuple[Holder, Any, Rewindable]]:
    """Wrap each kept iterator in a `Rewindable`; returns its holder, its key and the wrapper."""
    found = [
        (holder, key, Rewindable(value))
        for holder in holders
        for key, value in holder.values().items()
        if is_iterator(value)
    ]
    for holder, key, drawn in found:
        holder.entries[key] = drawn
    return found


@contextmanager
def _restoring_registered(models: Sequence[nn.Module]) -> Iterator[Callable[[], tuple[str, ...]]]:
    """`restoring` for hooks, for submodules and parameters by their names, for names of buffers,
    and for whether modules are in training.

    Yields:
        a function that names changed hooks, submodules, parameters and new buffers.
    """
    paths = {module: path for model in models for path, module in model.named_modules()}
    modules = list(paths)
    watched = ["training", "_modules", "_parameters", *(n for n in INTERNAL if "hooks" in n)]
    before = [
        (module, _with_contents({n: vars(module)[n] for n in watched if n in vars(module)}))
        for module in modules
    ]
    names = {module: buffer_names(module) for module in modules}
    empty = [(module, n) for module in modules for n in names[module] if getattr(module, n) is None]
    known = {name for model in models for name in buffers_of(model)}

    def changed() -> tuple[str, ...]:
        found = (
            f"{paths[module]}.{changed_name}".strip(".").replace("._", ".")
            for module, attributes in before
            for name, (value, content) in attributes.items()
            if vars(module)[name] is not value or not is_as(value, content)
            for changed_name in _names_in(name, vars(module)[name], content)
        )
        return (*found, *(n for model in models for n in buffers_of(model) if n not in known))

    try:
        yield changed
    finally:
        for module, content in before:
            _put_back(vars(module), content)
        for module, first in names.items():  # a first call may have registered some
            for name in buffer_names(module) - first:
                delattr(module, name)
        for module, name in empty:
            setattr(module, name, None)


def _names_in(name: str, value: Any, content: Any) -> list[str]:
    """The submodules or parameters that have changed in a module's dict of them; of any other
    attribute its name."""
    if name not in ("_modules", "_parameters"):
        return [name]
    before = dict(zip(content[::2], content[1::2], strict=True))
    return [key for key in {**before, **value} if before.get(key) is not value.get(key)]


def without_values(model: nn.Module) -> list[str]:
    """The names under which a model with fake parameters keeps other fake tensors.

    `copies` for `self.copies = [p.clone() for p in self.parameters()]`.
    """
    found = {
        holder.label(key): None
        for holder in holders_of(model)
        for key, value in holder.values().items()
        if isinstance(value, Tensor) and is_fake(value)
    }
    return list(found)


@contextmanager
def left_by(model: nn.Module, twins: Iterable[nn.Module]) -> Iterator[None]:
    """Within, the twins of a model have the tensors that forward has left in its attributes.

    A loss may read such a tensor (`model.aux_loss`) from the module that it holds, while the model
    that runs is a copy of that module without weights: a twin.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    for twin in twins:
        modules = dict(twin.named_modules())
        for path, module in model.named_modules() if twin is not model else ():
            for name, value in vars(module).items() if path in modules else ():
                if name not in INTERNAL and any(True for _ in tensors_in(value)):
                    attributes = modules[path].__dict__
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
    """Whether a value or its content differs from what `_with_contents` has noted."""
    if known is None or value is not known[0]:
        return known is None or frozen(value, deep=False) != frozen(known[0], deep=False)
    return not is_as(value, known[1])


def _with_contents(values: Mapping[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    return {name: (value, content_of(value)) for name, value in values.items()}


def _put_back(values: MutableMapping[Any, Any], known: Mapping[Any, tuple[Any, Any]]) -> None:
    for name, (value, content) in known.items():
        if name not in values or values[name] is not value:
            values[name] = value
        put_back(value, content)
