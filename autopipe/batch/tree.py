"""Batches as trees: leaves by path, and a tree made of leaves again.

    {"ids": [8, 24], "image": {"mask": [8, 24]}}  ->  {"ids": ..., "image.mask": ...}

A batch is what `inputs(batch_size)` gives: a tuple for `model(*batch)`, a dict for
`model(**batch)`. Entries that the model's forward does not take are for the loss alone. Containers
are dicts, tuples, lists, and a user's own: named tuples, dataclasses, mappings.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, make_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopipe.errors import ModelError
from autopipe.planfile.parts import InputSpec
from autopipe.util import dims

Leaf = Tensor | bool | int | float | str | None

_VALUES = bool, int, float
_PLAIN = dict, OrderedDict, defaultdict
_OWN = {"named", "fields", "mapping"}
"""Kinds of containers that only a user's code can make, or whose keys no path tells."""


def flatten(batch: object) -> dict[str, Leaf]:
    """The leaves of a batch by path, in the batch's own order; numpy's numbers as Python's.

    Raises:
        ModelError: a leaf is neither a tensor nor a Python number, text or None; two leaves have
            one path; or a container's key has a dot.
    """
    leaves: dict[str, Leaf] = {}
    for path, found, _ in walk(batch):
        leaf = found.item() if isinstance(found, np.generic) else found
        if not (leaf is None or isinstance(leaf, Tensor | str) or type(leaf) in _VALUES):
            name = type(leaf).__name__
            instead = f"let inputs() give its tensors, and forward make a {name} of them"
            if isinstance(leaf, np.ndarray):
                instead = "torch.from_numpy(array) makes a tensor of it"
            elif isinstance(leaf, _VALUES):  # of an IntEnum
                instead = f"give its plain value, and let forward make a {name} of it"
            raise ModelError(
                f"{f'batch[{path!r}]' if path else 'the batch'} is a {name}; a batch holds "
                "tensors, numbers, text and None in dicts, tuples, lists and dataclasses",
                hint=instead,
            )
        if path in leaves:
            raise ModelError(
                f"two entries of the batch are {path!r}: the keys on the way to each, with dots",
                hint="name one of them otherwise",
            )
        leaves[path or "0"] = leaf
    return leaves


def walk(
    tree: object, path: str = "", within: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """The leaves, each with its path and the kinds of the containers that it stands in.

    Raises:
        ModelError: a container's key has a dot: of `a.b.c` nobody could tell which keys it is of.
    """
    if (container := _opened(tree)) is None:
        yield path, tree, within
        return
    kind, items = container
    for key, item in items.items():
        if "." in str(key) and _opened(item) is not None:
            raise ModelError(
                f"the batch has a {type(item).__name__} under the key {str(key)!r}, and a path in "
                "it has dots between keys",
                hint=f"name it {str(key).replace('.', '_')!r}, or give its tensors keys of their "
                "own beside it",
            )
        yield from walk(item, f"{path}.{key}" if path else str(key), (*within, kind))


def _opened(tree: object) -> tuple[str, Mapping[Any, Any]] | None:
    """A container's kind, as `InputSpec.within` has it, and what it holds by key; None: a leaf.

    list, tuple, dict; numbered: a dict by numbers; and of a user's classes, or by other keys than
    texts: mapping, a named tuple `named x y`, a dataclass `fields x y`.
    """
    if isinstance(tree, Mapping):
        keys = {type(key) for key in tree} if type(tree) in _PLAIN else {object}
        return {(int,): "numbered", (str,): "dict", (): "dict"}.get((*keys,), "mapping"), tree
    if isinstance(tree, Sequence) and not isinstance(tree, str | bytes | bytearray):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        names = getattr(tree, "_fields", None)
        return kind if names is None else " ".join(("named", *names)), dict(enumerate(tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in fields(tree)]
        return " ".join(("fields", *names)), {name: getattr(tree, name) for name in names}
    return None


def empty_in(tree: object, path: str = "") -> tuple[str, object] | None:
    """The first empty container in a batch, with its path; None: there is none."""
    if (container := _opened(tree)) is None:
        return None
    found = (empty_in(item, f"{path}.{key}".lstrip(".")) for key, item in container[1].items())
    return next(filter(None, found), None) if container[1] else (path, tree)


def rebuild(batch: object, leaves: Mapping[str, Any]) -> Any:
    """The tree of `batch` with its leaves replaced by `leaves`, which are keyed by path."""

    def rebuilt(tree: object, path: str) -> Any:
        if (container := _opened(tree)) is None:
            return leaves[path or "0"]
        return _refilled(
            tree,
            {
                key: rebuilt(item, f"{path}.{key}" if path else str(key))
                for key, item in container[1].items()
            },
        )

    return rebuilt(batch, "")


def _refilled(container: Any, items: dict[Any, Any]) -> Any:
    """A container like this one, which holds `items` by the same keys."""
    if isinstance(container, Sequence):
        if hasattr(container, "_fields"):
            return type(container)(*items.values())
        return tuple(items.values()) if isinstance(container, tuple) else [*items.values()]
    if isinstance(container, MutableMapping) and type(container) not in _PLAIN:
        container = copy.copy(container)  # with what a user's class keeps beside its entries
        for key, item in items.items():
            container[key] = item
        return container
    if is_dataclass(container):
        container = copy.copy(container)
        for name, item in items.items():
            object.__setattr__(container, name, item)  # frozen ones too, without `__post_init__`
        return container
    return items


def has_own(specs: Sequence[InputSpec]) -> bool:
    """Whether a batch of this description has containers of a user's classes, or with keys other
    than texts, which `from_specs` replaces by plain ones."""
    return any(kind.split()[0] in _OWN for spec in specs for kind in spec.within)


def from_specs(specs: Sequence[InputSpec], rows: int) -> Any:
    """A batch of `rows` rows with the described shapes and dtypes; its values are arbitrary."""
    leaves: dict[str, Leaf] = {}
    for spec in specs:
        if spec.dtype == "python":
            leaves[spec.path] = spec.value
        else:
            shape = [dims.size_at(entry, rows) for entry in spec.shape]
            leaves[spec.path] = torch.full(shape, spec.low or 0, dtype=getattr(torch, spec.dtype))
    return of_specs(specs, leaves)


def of_specs(specs: Sequence[InputSpec], leaves: Mapping[str, Any]) -> Any:
    """A batch of this description, made of `leaves`; a user's container class becomes plain."""
    return _unflatten({spec.path: (spec.within, leaves[spec.path]) for spec in specs})


def _unflatten(leaves: Mapping[str, tuple[Sequence[str], Any]]) -> Any:
    """The tree of leaves by path, each with the kinds of its containers. A leaf without kinds is in
    containers that its path implies: a tuple where all keys are numbers, else a dict."""
    levels: dict[str, dict[str, Any]] = {}
    kind = ""
    for path, (kinds, leaf) in leaves.items():
        # A key may have dots itself; what is in a single container has no other key.
        head, _, rest = (path, "", "") if len(kinds) == 1 else path.partition(".")
        kind, *below = kinds or [""]
        levels.setdefault(head, {})[rest] = below, leaf
    tree = {
        head: level[""][1] if "" in level else _unflatten(level) for head, level in levels.items()
    }
    match kind.split() or ["tuple" if all(map(str.isdigit, tree)) else "dict"]:
        case ["numbered"]:
            return {int(key): item for key, item in tree.items()}
        case ["list"]:
            return [*tree.values()]
        case ["tuple"]:
            return tuple(tree.values())
        case ["named", *names]:
            return namedtuple("Batch", names)(*tree.values())
        case ["fields", *_]:
            return make_dataclass("Batch", tree)(**tree)
    return tree
