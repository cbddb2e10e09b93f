"""Arguments and results of a call as a tree with numbered places for its tensors.

((x, None), {"scale": 2.0})     parts_of   ((_0, None), {"scale": 2.0})      tensors: [x]
                                to_text    '{"tuple": [...]}'                for a plan
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopipe.errors import PlanError
from autopipe.ir.graph import tensors_in
from autopipe.util.dtypes import bytes_of, name_of


class Unlike(Exception):
    """A call of a module cannot be told by its tensors and plain values alone."""


def distinct_tensors(tree: Any) -> list[Tensor]:
    """The tensors in a tree of containers, in order, each once."""
    return list({id(tensor): tensor for tensor in tensors_in(tree)}.values())


class Slot(NamedTuple):
    """In a tree, the tensor of this number."""

    number: int


def parts_of(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """A tree of containers with a place where each of the tensors stands.

    Raises:
        Unlike: something in the tree is no plain value.
    """
    if isinstance(tree, Tensor):
        return Slot(next(n for n, tensor in enumerate(tensors) if tensor is tree))
    if type(tree) in (tuple, list):
        return type(tree)(parts_of(item, tensors) for item in tree)
    if type(tree) is dict:
        return {key: parts_of(item, tensors) for key, item in tree.items()}
    if tree is None or isinstance(tree, bool | int | float | str | torch.dtype | torch.device):
        return tree
    raise Unlike(f"a {type(tree).__name__} goes into a module or comes out of it")


def whole_of(parts: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `parts_of`: the tree with tensors in its places."""
    if isinstance(parts, Slot):
        return tensors[parts.number]
    if isinstance(parts, tuple | list):
        return type(parts)(whole_of(item, tensors) for item in parts)
    if isinstance(parts, dict):
        return {key: whole_of(item, tensors) for key, item in parts.items()}
    return parts


def to_text(parts: Any) -> str:
    """The result of `parts_of` as JSON text.

    Raises:
        Unlike: a device, or a key that is no text: another process would not know it.
    """
    return json.dumps(_written(parts))


def from_text(text: str) -> Any:
    """The inverse of `to_text`.

    Raises:
        PlanError: `to_text` has not written it.
    """
    try:
        return _read(json.loads(text))
    except (ValueError, TypeError, LookupError) as error:
        raise PlanError(
            f"plan.regions: {text!r} is no description of arguments or results",
            hint="plan again with `autopipe plan`",
        ) from error


def _written(parts: Any) -> Any:
    if isinstance(parts, Slot):
        return {"tensor": parts.number}
    if isinstance(parts, tuple):
        return {"tuple": [_written(item) for item in parts]}
    if isinstance(parts, list):
        return [_written(item) for item in parts]
    if isinstance(parts, dict) and all(isinstance(key, str) for key in parts):
        return {"dict": {key: _written(item) for key, item in parts.items()}}
    if isinstance(parts, torch.dtype):
        return {"dtype": name_of(parts)}
    if isinstance(parts, torch.device | dict):
        raise Unlike(f"{parts} goes into a module or comes out of it")
    return parts


def _read(data: Any) -> Any:
    if isinstance(data, list):
        return [_read(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, inside),) = data.items()
    return _READ[kind](inside)


def _dtype(name: Any) -> torch.dtype:
    bytes_of(name)  # a plan may be anybody's: no other name of torch's
    found: torch.dtype = getattr(torch, name)
    return found


_READ: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda number: Slot(int(number)),
    "tuple": lambda items: tuple(map(_read, items)),
    "dict": lambda items: {key: _read(item) for key, item in items.items()},
    "dtype": _dtype,
}
"""How each kind of what is no plain JSON is read."""
