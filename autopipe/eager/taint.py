"""Follow where tensors come from: which real tensors hold something computed from certain others.

out = torch.zeros(3)        # real
out[0] = hidden.sum()       # hidden is fake: out keeps its zero, a wrong value
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_private import TorchDispatchMode, is_fake, written_arguments


class Taint(TorchDispatchMode):
    """Marks the real tensors that are computed from a source, or that one was written into.

    Every fake tensor is a source. Called with a real tensor, it tells whether that is marked.

    Args:
        sources: real tensors that are sources too.
        draws: whether random numbers are sources.
    """

    def __init__(self, sources: Iterable[Tensor] = (), *, draws: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, Tensor] = {}  # by address; the tensor keeps the address taken
        self._draws = draws
        for tensor in sources:
            self._mark(tensor)
        self._sources = dict(self._storages)

    def __call__(self, tensor: Tensor) -> bool:
        return (
            tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in self._storages
        )

    def forget_all_but(self, kept: Iterable[Tensor]) -> None:
        """Forget the marks, and free the memory, of all but the sources and these tensors."""
        marked = [tensor for tensor in kept if not is_fake(tensor) and self(tensor)]
        self._storages = dict(self._sources)
        for tensor in marked:
            self._mark(tensor)

    def _mark(self, tensor: Tensor) -> None:
        if not is_fake(tensor) and tensor.layout == torch.strided and tensor.numel():
            self._storages[tensor.untyped_storage().data_ptr()] = tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = list(tensors_in((args, kwargs or {})))
        drawn = self._draws and torch.Tag.nondeterministic_seeded in func.tags
        if drawn or any(is_fake(t) or self(t) for t in operands):
            for tensor in tensors_in((result, written_arguments(func, args, kwargs or {}))):
                self._mark(tensor)
        return result
