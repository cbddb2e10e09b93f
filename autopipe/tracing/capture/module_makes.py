"""Describe modules by their make: classes, parameters, buffers and modules inside, as one value.

`tracing.same_modules` compares the calls of sibling modules whose makes are equal.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.eager.frozen import INTERNAL, frozen
from autopipe.ir.torch_private import is_fake, storage_key

_HOOKS = tuple(name for name in sorted(INTERNAL) if name.endswith("hooks"))


def alike_siblings(known: Mapping[str, Hashable]) -> dict[str, str]:
    """Map each module's path to that of the first sibling with an equal value in `known`."""
    firsts: dict[Hashable, str] = {}
    alike: dict[str, str] = {}
    for path, what in known.items():
        first = firsts.setdefault((path.rpartition(".")[0], what), path)
        if first != path:
            alike[path] = first
    return alike


def candidates_of(model: nn.Module) -> dict[str, tuple[nn.Module, Hashable]]:
    """The outermost modules with parameters and submodules that have a sibling of the same make.

    Returns path -> (module, make); empty if the model has one module at two places.
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


def siblings_among(candidates: Mapping[str, tuple[nn.Module, Hashable]]) -> list[list[str]]:
    """The paths of the candidates, those of one parent and one make together, in order."""
    found: dict[Hashable, list[str]] = defaultdict(list)
    for path, (_, make) in candidates.items():
        found[path.rpartition(".")[0], make].append(path)
    return list(found.values())


def _order(path: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.split(".")]


def _make(module: nn.Module, path: str, homes: Mapping[int, list[str]]) -> Hashable:
    """A module's make, without attributes; that of one with hooks or shared tensors is unique."""
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


def attached_to(module: nn.Module) -> int:
    """How many hooks, and forwards of their own, a module and those in it have."""
    return sum(
        ("forward" in vars(inner)) + sum(len(vars(inner).get(hooks) or ()) for hooks in _HOOKS)
        for inner in module.modules()
    )


def look_of(tensor: Tensor) -> Hashable:
    where = tensor.storage_offset(), tensor.device, is_fake(tensor)
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, where


def modes() -> Hashable:
    """The modes that hold around an op: whether gradients are on, and autocast."""
    autocast = tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )
    return torch.is_grad_enabled(), autocast


def attributes_of(attributes: Mapping[str, Any]) -> Hashable:
    """The attributes that a module has of its own."""
    return tuple((name, frozen(v)) for name, v in attributes.items() if name not in INTERNAL)


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
    """The numbers and texts in some namespaces, and the sizes of containers there."""
    found: list[Hashable] = []
    for space in spaces:
        for name, value in space.items():
            if isinstance(value, bool | int | float | str):
                found.append((name, type(value), repr(value)))
            elif isinstance(value, list | dict | set):
                found.append((name, len(value)))
    return tuple(found)
