"""Arguments and results of a call as a tree with numbered places for its tensors.

((x, None), {"scale": 2.0})     parts_of   ((_0, None), {"scale": 2.0})      tensors: [x]
Output(hidden=h, mask=None)                Struct(Output, {"hidden": _0, "mask": None})
                                to_text    '{"tuple": [...]}'                for a plan
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopipe.errors import PlanError
from autopipe.ir.tensors import tensors_in
from autopipe.opaque.calls.sites import state_of
from autopipe.opaque.calls.sparse import is_sparse
from autopipe.util.dtypes import bytes_of, name_of

_GOES = "goes into a module or comes out of it"

_NOTHING: Mapping[int, str] = MappingProxyType({})


class NotPlain(Exception):
    """Raised where a call has an argument or a result that a tree cannot hold."""


def distinct_tensors(tree: Any) -> list[Tensor]:
    """The dense tensors in a tree of containers, in order, each once."""
    dense = (tensor for tensor in tensors_in(tree) if not is_sparse(tensor))
    return list({id(tensor): tensor for tensor in dense}.values())


def returned(result: Any, left: Mapping[str, Tensor]) -> Any:
    """The results of a call: what it returns, and tensors that it leaves in attributes, if any."""
    return (result, dict(left)) if left else result


class Slot(NamedTuple):
    """The place in a tree of the tensor with this number."""

    number: int


class Own(NamedTuple):
    """The place in a tree of the model's sparse tensor with this name."""

    name: str


class Struct(NamedTuple):
    """An object of a dataclass or a named tuple in a tree: its class and its fields."""

    kind: type
    fields: Mapping[str, Any]


def parts_of(tree: Any, tensors: Sequence[Tensor], sparse: Mapping[int, str] = _NOTHING) -> Any:
    """A tree of containers with a `Slot` in the place of each of `tensors`.

    Args:
        sparse: names of the model's sparse tensors, by their identity (`sparse.owned`).

    Raises:
        NotPlain: something in the tree is no plain value.
    """
    if isinstance(tree, Tensor) and is_sparse(tree):
        if id(tree) not in sparse:
            raise NotPlain(f"a sparse tensor {_GOES}")
        return Own(sparse[id(tree)])
    if isinstance(tree, Tensor):
        return Slot(next(n for n, tensor in enumerate(tensors) if tensor is tree))
    if (fields := _fields(tree)) is not None:
        parts = {name: parts_of(item, tensors, sparse) for name, item in fields.items()}
        return Struct(type(tree), parts)
    if type(tree) in (tuple, list):
        return type(tree)(parts_of(item, tensors, sparse) for item in tree)
    if type(tree) is dict:
        return {key: parts_of(item, tensors, sparse) for key, item in tree.items()}
    if tree is None or isinstance(tree, bool | int | float | str | torch.dtype | torch.device):
        return tree
    raise NotPlain(f"a {type(tree).__name__} {_GOES}")


def _fields(tree: Any) -> Mapping[str, Any] | None:
    """The fields from which an object can be made again; None: it has other attributes, or none."""
    if isinstance(tree, tuple) and hasattr(tree, "_asdict"):
        found: Mapping[str, Any] = tree._asdict()
        return found
    if isinstance(tree, type) or not is_dataclass(tree) or not all(f.init for f in fields(tree)):
        return None
    names = [field.name for field in fields(tree)]
    if getattr(tree, "__dict__", {}).keys() - names:
        return None
    return {name: getattr(tree, name) for name in names}


def whole_of(parts: Any, tensors: Sequence[Tensor], model: nn.Module | None = None) -> Any:
    """The inverse of `parts_of`: the tree with tensors in the place of its slots.

    Args:
        model: the model that has the sparse tensors the tree names.
    """
    if isinstance(parts, Slot):
        return tensors[parts.number]
    if isinstance(parts, Own):
        assert model is not None, "only calls that run as they are take any"
        return state_of(model, parts.name)
    if isinstance(parts, Struct):
        return parts.kind(**whole_of(parts.fields, tensors, model))
    if isinstance(parts, tuple | list):
        return type(parts)(whole_of(item, tensors, model) for item in parts)
    if isinstance(parts, dict):
        return {key: whole_of(item, tensors, model) for key, item in parts.items()}
    return parts


def to_text(parts: Any) -> str:
    """The result of `parts_of` as JSON text.

    Raises:
        NotPlain: a device, a key that is no text, a class without a home: another process would not
            know it.
    """
    return json.dumps(_written(parts))


def from_text(text: str) -> Any:
    """The inverse of `to_text`, where the model has been built.

    Raises:
        PlanError: the text is not one of `to_text`, or names a class unknown in this process.
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
    if isinstance(parts, Own):
        return {"own": parts.name}
    if isinstance(parts, Struct):
        return {"struct": [*_name(parts.kind), _written(parts.fields)]}
    if isinstance(parts, tuple):
        return {"tuple": [_written(item) for item in parts]}
    if isinstance(parts, list):
        return [_written(item) for item in parts]
    if isinstance(parts, dict) and all(isinstance(key, str) for key in parts):
        return {"dict": {key: _written(item) for key, item in parts.items()}}
    if isinstance(parts, torch.dtype):
        return {"dtype": name_of(parts)}
    if isinstance(parts, torch.device | dict):
        raise NotPlain(f"{parts} {_GOES}")
    return parts


def _name(kind: type) -> tuple[str, str]:
    """The name by which another process that has built the same model finds a class."""
    name = kind.__module__, kind.__qualname__
    if _class(*name) is not kind:
        raise NotPlain(f"a {kind.__qualname__}, a class within a function, {_GOES}")
    return name


def _class(module: str, name: str) -> Any:
    """A class of a module that was imported when the model was built; None: there is none."""
    home: Any = sys.modules.get(module)
    return reduce(lambda inside, part: getattr(inside, part, None), name.split("."), home)


def _struct(module: str, name: str, values: Any) -> Struct:
    kind = _class(str(module), str(name))  # a plan may be anybody's: no function, no other class
    if not isinstance(kind, type) or not (is_dataclass(kind) or hasattr(kind, "_asdict")):
        raise PlanError(
            f"plan.regions: a part that runs as it is takes or gives a {name} of {module}, which "
            "is no dataclass and no named tuple of this process",
            hint="import that module in the file of the model, or plan again",
        )
    return Struct(kind, _read(values))


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
    "struct": lambda parts: _struct(*parts),
    "tensor": lambda number: Slot(int(number)),
    "own": lambda name: Own(str(name)),
    "tuple": lambda items: tuple(map(_read, items)),
    "dict": lambda items: {key: _read(item) for key, item in items.items()},
    "dtype": _dtype,
}
"""How each kind of what is no plain JSON is read."""
