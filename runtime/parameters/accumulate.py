"""Adds the gradients of a micro-batch to a parameter's, as autograd does, without its engine.

    first of a step    .grad = gradient     the tensor itself if it shares its memory with no other,
                                            else a copy
    later ones         .grad += gradient    in place
    then               hooks on the sum     `register_post_accumulate_grad_hook`

The engine does the same, to the bit, in five times the time: it makes an edge and a task for each
gradient. A gradient of 16 bits is added to a sum in fp32 without a cast before, which is as exact
and takes one kernel instead of two.

The engine is used for parameters with hooks of `Tensor.register_hook`, which may change a gradient,
and for sparse gradients. Hooks on nodes of autograd's graph, such as those of
`torch.autograd.graph.register_multi_grad_hook`, are not called, since no node runs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autopipe.ir.torch_private import tensor_hooks


def accumulate(parameter: Tensor, gradient: Tensor, *, own: bool = False) -> None:
    """Add to a parameter's gradient, hooks and all; for `torch.no_grad()`.

    Args:
        gradient: has the parameter's shape, and may have fewer bits than the sum.
        own: whether it shares its memory with no other tensor, so that it may become the sum.
    """
    before, after = tensor_hooks(parameter)
    present = parameter.grad
    if before or not _dense(gradient) or (present is not None and not _dense(present)):
        torch.autograd.backward([get_gradient_edge(parameter)], [gradient])
        return
    if present is None:
        parameter.grad = _first(parameter, gradient, own)
    else:
        present.add_(
            gradient if exact(gradient.dtype, present.dtype) else gradient.to(present.dtype)
        )
    for hook in after:
        hook(parameter)


@cache
def exact(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether one floating dtype has every number of another one, as fp32 has those of bf16."""
    return torch.promote_types(narrow, wide) == wide


def _first(parameter: Tensor, gradient: Tensor, own: bool) -> Tensor:
    """A gradient in the dtype that the sum is to have, strided as the parameter."""
    dtype = parameter.grad_dtype or gradient.dtype
    if own and gradient.dtype == dtype and gradient.stride() == parameter.stride():
        if gradient.untyped_storage().nbytes() == gradient.nbytes:  # else it would hold more
            return gradient.detach()
    return torch.empty_like(parameter, dtype=dtype).copy_(gradient)


def _dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided
