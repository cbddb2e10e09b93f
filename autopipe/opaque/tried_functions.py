"""Apply a custom Function to copies of its tensors, to see what an op that applies it would do.

forward(ctx, x):  return x * torch.rand_like(x)      draws: the op draws from a stream of its own
forward(ctx, x):  return x * Store.mean              reads a tensor that is no argument
backward(ctx, g): ctx.buffer.add_(g.sum())           writes an argument
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_private import TorchDispatchMode, is_fake, storage_key, version


class Tried(NamedTuple):
    """What a Function has done.

    Attributes:
        draws: its forward draws random numbers.
        reads_others: its forward reads a tensor without values that it is not given. Only what the
            model makes, or trains, has none; a table of constants has.
        written: its backward writes a tensor that its forward was given.
    """

    draws: bool
    reads_others: bool
    written: bool


def tried(apply: Callable[[Sequence[Tensor]], Sequence[Tensor]], given: Sequence[Tensor]) -> Tried:
    """Apply a Function to copies of some tensors, forward and backward.

    Raises:
        Exception: what the Function raises.
    """
    copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
    with torch.random.fork_rng(devices=[]):
        with _Watching(copies) as watching:
            results = apply(copies)
        return Tried(watching.draws, watching.reads_others, _written_by_backward(results, copies))


def _written_by_backward(results: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    outputs = [result for result in results if result.requires_grad]
    inputs = [tensor for tensor in given if tensor.requires_grad]
    before = [version(tensor) for tensor in given]
    if outputs:
        gradients = [torch.ones_like(result) for result in outputs]
        torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
    return before != [version(tensor) for tensor in given]


class _Watching(TorchDispatchMode):
    """Sees whether random numbers are drawn, and fake tensors of other code are read."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = self.reads_others = False
        self._known = {storage_key(tensor): tensor for tensor in given}  # which keeps its storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        for tensor in tensors_in((args, kwargs or {})):
            self.reads_others |= is_fake(tensor) and storage_key(tensor) not in self._known
        result = func(*args, **(kwargs or {}))
        self._known |= {storage_key(tensor): tensor for tensor in tensors_in(result)}
        return result
