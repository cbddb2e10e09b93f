"""The results of a region where tensors have no values: of the measured shapes, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopipe.ir.torch_private import is_fake
from autopipe.opaque.results import at_rows, strides_in
from autopipe.planfile.regions import Result


def shaped(results: Sequence[Result], rows: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Fake tensors of the shapes of `results`, through which gradients flow to `tensors`.

    Args:
        rows: the rows of the batch, an integer or a symbol.
        tensors: the tensors that the region takes, at least one of them fake.
    """
    return list(_Shaped.apply(results, rows, *tensors))  # type: ignore[no-untyped-call]


class _Shaped(torch.autograd.Function):
    """Results without values, through which gradients without values flow."""

    @staticmethod
    def forward(ctx: Any, results: Sequence[Result], rows: Any, *tensors: Tensor) -> Any:
        outputs = tuple(_empty(result, rows, tensors) for result in results)
        ctx.like = tensors
        ctx.mark_non_differentiable(
            *(
                tensor
                for tensor, result in zip(outputs, results, strict=True)
                if not result.gradient
            )
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        operands = zip(ctx.like, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(torch.empty_like(t) if needed else None for t, needed in operands)


def _empty(result: Result, rows: Any, tensors: Sequence[Tensor]) -> Tensor:
    sizes = [at_rows(size, rows) for size in result.shape]
    like = next(tensor for tensor in tensors if is_fake(tensor))  # no read may take it for values
    strides = strides_in(result.order, sizes)  # no view: later code may write in it
    how = {"dtype": getattr(torch, result.dtype), "device": tensors[0].device}
    return like.new_empty_strided(sizes, strides, **how)
