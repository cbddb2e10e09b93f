"""The tensors in nested arguments and results, and how their sizes are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any

import sympy
import torch

from autopipe.ir.torch_private import expression, fake_like, fake_mode


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples, mappings and dataclasses, in order, repeats included."""
    found: list[torch.Tensor] = []
    _collect_tensors(tree, found)
    return iter(found)


_WITHOUT = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
"""Types that most arguments have and that hold no tensors."""


def _collect_tensors(tree: object, found: list[torch.Tensor]) -> None:
    if type(tree) in _WITHOUT:
        return
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _collect_tensors(item, found)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            _collect_tensors(item, found)
    elif is_dataclass(tree) and not isinstance(tree, type):
        _collect_tensors(object.__getstate__(tree), found)  # an attribute's own code may raise


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What code has set on a tensor, real or fake: `self.weight.scale = 2`."""
    return {name: value for name, value in vars(tensor).items() if name not in _own_of_fakes()}


@cache
def _own_of_fakes() -> frozenset[str]:
    fake = fake_like(fake_mode(), torch.nn.Parameter(torch.empty(0)))
    return frozenset(vars(fake)) | {"_is_param"}


def indexes_by_a_number(index: object) -> bool:
    """Whether an index is like that of `x[:, k]` or `x[:, :k]`, with a tensor k of one number."""
    parts = index if isinstance(index, tuple) else (index,)
    ends = [(part.start, part.stop, part.step) for part in parts if isinstance(part, slice)]
    if any(isinstance(end, torch.Tensor) for three in ends for end in three):
        return True
    numbers = [part for part in parts if isinstance(part, torch.Tensor) and part.ndim == 0]
    return any(number.dtype != torch.bool for number in numbers)


def of_unknown_size(tensor: torch.Tensor) -> bool:
    """Whether a size of a traced tensor is a symbol that stands for values of another tensor."""
    sizes: Sequence[Any] = tensor.shape
    return any(isinstance(s, torch.SymInt) and _of_values(expression(s)) for s in sizes)


@cache
def _of_values(size: sympy.Expr) -> bool:
    return any(symbol.name.startswith("u") for symbol in size.free_symbols)
