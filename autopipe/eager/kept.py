"""Put back what a model has kept from one call for the next, or tell what it has kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import nn

from autopipe.eager.assigned_buffers import as_before
from autopipe.eager.frozen import INTERNAL, frozen
from autopipe.eager.holders import Part, holders_of, modules_among
from autopipe.ir.graph import tensors_in
from autopipe.ir.torch_private import buffer_names


@contextmanager
def restoring(*parts: Part) -> Iterator[Callable[[], tuple[str, ...]]]:
    """Restore after the block what models and losses keep: buffers, hooks, and all `holders_of`.

    What a model keeps from one call to the next is then as before its first; the hooks too that it
    registers in its first call, as it notes that it has done so.

    Yields:
        a function that gives the names of what Python has kept by now that was not there before.
    """
    modules = modules_among(parts)
    with as_before(*parts), _restoring_registered(modules) as hooks, _restoring_kept(parts) as kept:
        yield lambda: (*kept(), *hooks())


@contextmanager
def _restoring_kept(parts: Sequence[Part]) -> Iterator[Callable[[], tuple[str, ...]]]:
    """As `restoring` has it, of all but what is registered with modules."""
    before = [(holder, _with_copies(holder.values())) for holder in holders_of(*parts)]

    def changed() -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(
                holder.label(key)
                for holder, known in before
                for key, value in holder.values().items()
                if _differs(value, known.get(key))
            )
        )

    try:
        yield changed
    finally:
        for holder, known in before:
            added = holder.values().keys() - known.keys()
            for key in sorted(added, reverse=True) if holder.inside else added:
                del holder.own[key]
            _put_back(holder.own, known)


@contextmanager
def _restoring_registered(
    models: Sequence[nn.Module],
) -> Iterator[Callable[[], tuple[str, ...]]]:
    """The same of hooks and names of buffers, and of whether modules are in training."""
    paths = {module: path for model in models for path, module in model.named_modules()}
    modules = list(paths)
    wanted = ["training", *(name for name in INTERNAL if "hooks" in name)]
    before = [
        (module, _with_copies({n: vars(module)[n] for n in wanted if n in vars(module)}))
        for module in modules
    ]
    names = {module: buffer_names(module) for module in modules}
    empty = [(module, n) for module in modules for n in names[module] if getattr(module, n) is None]

    def changed() -> tuple[str, ...]:
        return tuple(
            f"{paths[module]}.{name}".strip(".").replace("._", ".")
            for module, known in before
            for name, (value, was) in known.items()
            if vars(module)[name] is not value or (was is not None and _items(value) != _items(was))
        )

    try:
        yield changed
    finally:
        for module, known in before:
            _put_back(vars(module), known)
        for module, registered in names.items():  # a first call may have registered some
            for name in buffer_names(module) - registered:
                delattr(module, name)
        for module, name in empty:
            setattr(module, name, None)


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
    """Whether a value is another one than `_with_copies` has noted."""
    if known is None or value is not known[0]:
        return known is None or frozen(value, deep=False) != frozen(known[0], deep=False)
    return known[1] is not None and len(value) != len(known[1])


def _with_copies(own: Mapping[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    """Values, each with a copy if it is a list, a dict or a set."""
    contained = {n: copy(v) for n, v in own.items() if isinstance(v, list | dict | set)}
    return {name: (value, contained.get(name)) for name, value in own.items()}


def _put_back(own: MutableMapping[Any, Any], known: Mapping[Any, tuple[Any, Any]]) -> None:
    for name, (value, before) in known.items():
        if name not in own or own[name] is not value:
            own[name] = value
        if before is None or _items(value) == _items(before):
            continue
        if isinstance(value, list):
            value[:] = before
        else:
            value.clear()
            value.update(before)


def _items(container: Any) -> list[Any]:
    """Which objects a list, a dict or a set holds."""
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [*map(id, container)]
