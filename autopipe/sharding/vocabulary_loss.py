"""The cross-entropy of a large vocabulary, computed from a part of its columns at a time.

    x [rows, h] --linear--> logits [rows, v] --float--> fp32 --cross_entropy--> loss      as traced
    x [rows, h], w [v, h], target [rows] --vocabulary_loss--> loss           after `loss_in_parts`

The logits of 8192 tokens and 128,256 words are 4 GiB in fp32, and autograd keeps as many for
backward. Here no more than `width` columns of them exist at once. With lse = log(sum(exp(logits))),

    forward    lse = logaddexp(lse, logsumexp(x w_k')) for each part k of the columns
               loss = mean(lse - logits[target])
    backward   d_k = (exp(x w_k' - lse) - onehot) / count         the part is computed once more
               dx += d_k w_k,   dw_k = d_k' x

Kept are x, the target and lse. Liger-Kernel (Hsu et al., 2024, arXiv:2410.10989) makes dx and dw in
forward, from parts of the rows. In a pipeline that would hold a dw for each micro-batch in flight,
and leave zero-bubble schedules no weight gradient to put off. So backward computes the logits
again, a third more products, as Cut Cross-Entropy does (Wijmans et al., 2024, arXiv:2411.09009).
Columns are cut and not rows: each dw_k is then one product, and only dx, which is smaller, is a sum
over parts, in fp32.

Under tensor parallelism a rank has some columns. Log-sum-exps of ranks are put together as those of
parts are, by a maximum and a sum for each row (Megatron-LM, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopipe.sharding.collectives import axis_of

LOSS = "autopipe.vocabulary_loss.default"
"""The name of the op in a graph."""

MEAN, SUM = 1, 2
"""The reductions of torch's `cross_entropy_loss` to one number."""


@torch.library.custom_op("autopipe::vocabulary_loss", mutates_args=())
def vocabulary_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignored: int,
    reduction: int,
    dtype: torch.dtype,
    width: int,
    begin: int,
    axis: str,
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of x [..., h] @ weight' [h, v] + bias [v] with the words `target` [...].

    Args:
        ignored: the word that does not count.
        reduction: `MEAN` over the words that count, or `SUM`.
        dtype: that of the loss; all is computed in fp32, of an x of fp64 in fp64.
        width: columns of a part.
        begin: the number of the first word whose column is in `weight`.
        axis: the axis over whose ranks the columns are sharded; empty: all are here.

    Returns:
        The loss, a scalar, and the log-sum-exp of each row, for backward.

    Raises:
        IndexError: a target is no word, as torch says it; on a GPU, where to look would wait for
            it, the loss is nan.
    """
    rows, targets = _rows(x, weight), target.reshape(-1)
    unknown = _unknown(targets, ignored, begin, weight.shape[0], axis)
    total = torch.full((rows.shape[0],), -torch.inf, dtype=wide(weight.dtype), device=x.device)
    truth = torch.zeros_like(total)
    for first, logits in _parts(rows, weight, bias, width):
        column, inside = _own_columns(targets, begin + first, logits.shape[1])
        truth += logits.gather(1, column).squeeze(1).masked_fill_(~inside, 0.0)
        total = torch.logaddexp(total, logits.logsumexp(1))
    truth.masked_fill_(unknown, torch.nan)
    if axis:
        total, truth = _over_ranks(total, truth, axis)
    counting = targets != ignored
    loss = (total - truth).masked_fill(~counting, 0.0).sum()
    return (loss / counting.sum() if reduction == MEAN else loss).to(dtype), total


@vocabulary_loss.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignored: int,
    reduction: int,
    dtype: torch.dtype,
    *others: Any,
) -> tuple[Tensor, Tensor]:
    rows = x.new_empty((target.numel(),), dtype=wide(weight.dtype))
    return x.new_empty((), dtype=dtype), rows


@torch.library.custom_op("autopipe::vocabulary_loss_backward", mutates_args=())
def vocabulary_loss_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    total: Tensor,
    ignored: int,
    reduction: int,
    width: int,
    begin: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias; a tensor of no elements for those not `wanted`.

    With shards of the columns that of x is a part of the sum over the ranks.
    """
    rows, targets = _rows(x, weight), target.reshape(-1)
    counting = targets != ignored
    scale = gradient.to(total.dtype)
    # Of no word at all the loss is nan and the gradient zero, as in torch.
    each = counting * (scale / counting.sum().clamp(min=1) if reduction == MEAN else scale)
    of_x, of_weight, of_bias = _gradients(x, weight, wanted)
    sums = torch.zeros_like(rows, dtype=total.dtype) if wanted[0] else None
    for first, part in _parts(rows, weight, bias, width):
        column, inside = _own_columns(targets, begin + first, part.shape[1])
        part.sub_(total[:, None]).exp_()
        part.scatter_add_(1, column, -inside.to(part.dtype)[:, None]).mul_(each[:, None])
        if wanted[2]:
            of_bias[first : first + part.shape[1]] = part.sum(0)
        low = part.to(weight.dtype)
        if sums is not None:
            sums += low @ weight[first : first + part.shape[1]]
        if wanted[1]:
            torch.mm(low.t(), rows, out=of_weight[first : first + part.shape[1]])
    if sums is not None:
        of_x.copy_(sums.view(x.shape))
    return of_x, of_weight, of_bias


BACKWARD = torch.ops.autopipe.vocabulary_loss_backward.default
"""The op of the gradients; its last argument says which."""


@vocabulary_loss_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(x, weight, others[-1])


def _gradients(x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients of x, weight and bias."""
    shapes = [tuple(x.shape), tuple(weight.shape), (weight.shape[0],)]
    dtypes = [x.dtype, weight.dtype, weight.dtype]
    of_x, of_weight, of_bias = (
        x.new_empty(shape if asked else (0,), dtype=dtype)
        for shape, dtype, asked in zip(shapes, dtypes, wanted, strict=True)
    )
    return of_x, of_weight, of_bias


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, h], in the dtype of the weight: under autocast that is a low copy."""
    return x.reshape(-1, x.shape[-1]).to(weight.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a loss of such weights is computed."""
    return torch.promote_types(dtype, torch.float32)


def _parts(
    rows: Tensor, weight: Tensor, bias: Tensor | None, width: int
) -> Iterator[tuple[int, Tensor]]:
    """Where each part of the columns begins, and its logits [rows, width], in fp32 or fp64."""
    for first in range(0, weight.shape[0], width):
        here = slice(first, first + width)
        own = None if bias is None else bias[here]
        yield first, torch.nn.functional.linear(rows, weight[here], own).to(wide(weight.dtype))


def _own_columns(targets: Tensor, begin: int, width: int) -> tuple[Tensor, Tensor]:
    """The column [rows, 1] of each row's word in a part, and whether it is in it [rows]."""
    column = targets - begin
    inside = (column >= 0) & (column < width)
    return column.masked_fill(~inside, 0)[:, None], inside


def _unknown(targets: Tensor, ignored: int, begin: int, columns: int, axis: str) -> Tensor:
    """Which targets [rows] are no words, as far as this rank sees: the first one those below 0, the
    last one those beyond all columns."""
    ranks = axis_of(axis) if axis else None
    unknown = torch.zeros_like(targets, dtype=torch.bool)
    if begin == 0:
        unknown |= targets < 0
    if ranks is None or ranks.rank == ranks.size - 1:
        unknown |= targets >= begin + columns
    unknown &= targets != ignored
    if unknown.device.type == "cpu" and unknown.any():
        raise IndexError(f"Target {int(targets[unknown][0])} is out of bounds.")
    return unknown


def _over_ranks(total: Tensor, truth: Tensor, axis: str) -> tuple[Tensor, Tensor]:
    """Log-sum-exps and logits of the targets of all columns, from those of each rank's."""
    most = axis_of(axis).all_reduce(total.clone(), "max")
    powers, found = axis_of(axis).all_reduce(torch.stack([(total - most).exp(), truth]), "sum")
    return most + powers.log(), found


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, target, ctx.ignored, ctx.reduction, _, ctx.width, ctx.begin, _ = inputs
    ctx.dtype = x.dtype
    ctx.mark_non_differentiable(output[1])
    low = x if x.dtype == weight.dtype else x.to(weight.dtype)
    ctx.save_for_backward(low, weight, bias, target, output[1])


def _back(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    options = ctx.ignored, ctx.reduction, ctx.width, ctx.begin, wanted
    of_x, *others = vocabulary_loss_backward(gradient, *ctx.saved_tensors, *options)
    of_x = of_x if of_x.dtype == ctx.dtype else of_x.to(ctx.dtype)
    gradients = zip((of_x, *others), wanted, strict=True)
    return *(tensor if is_wanted else None for tensor, is_wanted in gradients), *(None,) * 7


vocabulary_loss.register_autograd(_back, setup_context=_remember)
