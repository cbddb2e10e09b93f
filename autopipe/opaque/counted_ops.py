"""Count what the ops of a call do: operations, launches, random numbers, bytes for backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from autopipe.eager.refused_effects import RefusedEffects
from autopipe.ir.tensors import bytes_of, tensors_in
from autopipe.ir.torch_private import TorchDispatchMode, no_function_modes, storage_key

NO_HOOKS = ("saved tensor hooks", "that doesn't have storage")
"""What torch says where hooks on saved tensors may not be, or get a tensor of a transform."""


@dataclass
class CountedOps:
    """What the ops of one call have done.

    Attributes:
        looked: whether what autograd is given to keep could be looked at.
        random: whether one draws random numbers.
        flops: operations of products.
        launches: the number of ops.
        strided: storages that are read by `as_strided`.
        saved: bytes kept for backward of tensors that the call makes; set by `count_kept`.
        keeps: the tensors from outside that are kept, by position or name; set by `count_kept`.
    """

    looked: bool
    random: bool = False
    flops: int = 0
    launches: int = 0
    strided: set[int] = field(default_factory=set)
    saved: int = 0
    keeps: set[str | int] = field(default_factory=set)
    _packed: list[weakref.ref[Tensor]] = field(default_factory=list)
    _unseen: list[Tensor] = field(default_factory=list)

    def pack(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves; returns what it is to keep in its place."""
        with no_function_modes():
            kept = tensor.detach()  # a result that held its own function would never go
        self._packed.append(weakref.ref(kept))
        return kept

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count an op that has run."""
        self.launches += func is not torch.ops.aten.detach.default
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        if func is torch.ops.aten.as_strided.default:
            self.strided.add(storage_key(args[0]))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=result))
        if not self.looked:
            self._unseen.extend(tensors_in(result))

    def count_kept(self, owners: Mapping[int, str | int]) -> None:
        """Set `keeps` and `saved` to what autograd keeps, now that the run holds no tensors.

        If that could not be looked at, all that the ops have made counts as kept.

        Args:
            owners: the position or name of each tensor from outside, by its storage.
        """
        packed = [tensor for ref in self._packed if (tensor := ref()) is not None]
        kept = {storage_key(tensor): bytes_of(tensor) for tensor in [*self._unseen, *packed]}
        self.keeps = {owners[key] for key in kept if key in owners}
        self.saved = sum(size for key, size in kept.items() if key not in owners)
        self._packed, self._unseen = [], []


@contextmanager
def counting(into: CountedOps) -> Iterator[None]:
    """Within, count ops and what autograd saves for backward; refuse effects outside of tensors."""
    hooks = saved_tensors_hooks(into.pack, lambda tensor: tensor)
    with hooks if into.looked else nullcontext(), _Ops(into), RefusedEffects():
        yield


class _Ops(TorchDispatchMode):
    def __init__(self, into: CountedOps) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._into = into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._into.add(func, args, kwargs or {}, result)
        return result
