"""Gradients that a call takes itself must end within it: another part computes what comes before.

    h = self.first(x)
    self.adapt(h):                                      first.weight has gone into h, outside
        w = self.first.weight
        g, = torch.autograd.grad((h @ w).sum(), w)      through h too: the call is too small

An op is given h and w, and knows nothing of the way from one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopipe.ir.tensors import tensors_in
from autopipe.opaque.sites import Site, Wider


class InnerGradients(TorchFunctionMode):
    """Looks at the gradients that a call takes.

    Args:
        site: whose call runs within.
        given: its arguments, and the parameters and buffers that it may read.

    Raises:
        Wider: a gradient would go through what was computed outside of the call.
    """

    def __init__(self, site: Site, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._site = site
        self._given = given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            asked = args[1] if len(args) > 1 else kwargs["inputs"]
            self._check(list(tensors_in(asked)))
        return func(*args, **kwargs)

    def _check(self, asked: Sequence[Tensor]) -> None:
        wanted = {id(tensor) for tensor in asked}
        ends = {_end(tensor) for tensor in self._given if id(tensor) in wanted}
        for tensor in self._given:
            if id(tensor) not in wanted and ends & _before(tensor):
                raise Wider(
                    self._site,
                    "it takes a gradient that goes through what is computed outside of it",
                )


def _end(tensor: Tensor) -> object:
    """What a gradient ends at: a leaf, or the function that made a tensor."""
    return id(tensor) if tensor.grad_fn is None else tensor.grad_fn


def _before(tensor: Tensor) -> set[object]:
    """All that a tensor was made from, and itself, as `_end` tells it."""
    if tensor.grad_fn is None:
        return {id(tensor)}
    found, pending = set[object](), [tensor.grad_fn]
    while pending:
        function = pending.pop()
        if function not in found:
            found |= {function, id(getattr(function, "variable", None))}
            pending += [before for before, _ in function.next_functions if before is not None]
    return found
