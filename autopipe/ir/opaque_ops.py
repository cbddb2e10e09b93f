"""Measure what opaque ops save for backward: ops whose real kernel saves more than the fake one.

The CPU's LSTM (oneDNN) keeps a workspace whose size only the kernel knows; under fake tensors it is
empty, and a stage with an LSTM would be predicted at a tenth of its bytes. Such an op is run once
for real, on zeros of the same shapes, and the bytes that this run saves are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopipe.ir.graph import tensors_in
from autopipe.ir.torch_private import outside_fake_mode, storage_key

OPAQUE = ("aten.lstm.input",)

Pack = Callable[[Tensor], Tensor]
_packs: list[Pack] = []


@contextmanager
def observing(pack: Pack) -> Iterator[None]:
    """Within, call `pack` with every tensor that autograd or an opaque op's real kernel saves."""
    _packs.append(pack)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _same):
            yield
    finally:
        _packs.pop()


def run(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an opaque op on fake tensors, and pass to the observer what its real kernel saves."""
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        result = op(*args, **kwargs)
    if _packs and torch.is_grad_enabled():
        operands = list(tensors_in(args))
        # Autocast decides what the kernel computes in, and so what it keeps.
        low = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        saved, workspace = _kept(op, low, _described(args))
        for position in saved:
            _packs[-1](operands[position])
        _packs[-1](torch.empty(workspace, dtype=torch.uint8))
    return result


@lru_cache(maxsize=256)
def _kept(
    op: Callable[..., Any], low: torch.dtype | None, described: tuple[Any, ...]
) -> tuple[tuple[int, ...], int]:
    """The positions of operands that the real kernel saves, and the bytes of all else it saves."""
    with outside_fake_mode(), torch.enable_grad():
        args = _zeros(described)
        positions = {storage_key(t): n for n, t in enumerate(tensors_in(args))}
        kept: dict[int, int] = {}
        alive: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            alive.append(tensor)
            kept[storage_key(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, _same):
            op(*args)
    saved = sorted(positions[key] for key in kept if key in positions)
    return tuple(saved), sum(size for key, size in kept.items() if key not in positions)


def _described(arg: Any) -> Any:
    """An argument with (shape, dtype, requires_grad) in place of each tensor."""
    if isinstance(arg, Tensor):
        return "tensor", tuple(arg.shape), arg.dtype, arg.requires_grad
    return tuple(map(_described, arg)) if isinstance(arg, list | tuple) else arg


def _zeros(described: Any) -> Any:
    if isinstance(described, tuple) and described[:1] == ("tensor",):
        _, shape, dtype, gradient = described
        return torch.zeros(shape, dtype=dtype, requires_grad=gradient)
    return tuple(map(_zeros, described)) if isinstance(described, tuple) else described


def _same(tensor: Tensor) -> Tensor:
    return tensor
