"""Replace ops, in dry runs for GPUs, by the kernels of GPUs that keep other bytes for backward.

    dropout      CPU    x * noise             keeps the noise, in the dtype of x
                 GPU    one kernel            keeps a mask, a byte an element
    RMS norm     CPU    written out           keeps three tensors in fp32
                 GPU    one kernel            keeps its argument, and a number a row
    attention    CPU    written out, where    keeps scores and weights [heads, s, t] in fp32
                        it has dropout, a
                        mask with a gradient,
                        or values of another
                        width than its keys
                 GPU    flash or memory-      keeps its result and a number a row
                        efficient attention

A plan for GPUs is made on fake tensors of a CPU, where there may be no GPU. Within `for_gpus`
stages call the ops of torch's CUDA backend: the shapes of their results and saved tensors are known
on any machine.

Sources: ATen's Dropout.cpp (`is_fused_kernel_acceptable`), layer_norm.cpp (`rms_norm_symint`), and
sdp_utils.cpp of its CUDA backend for what each kernel of attention takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from autopipe.rewriting.for_gpus import of_gpus
from autopipe.rewriting.gpu_autocast import cast

_aten = torch.ops.aten
_DROPOUT, _ATTENTION = _aten.dropout.default, _aten.scaled_dot_product_attention.default
_RMS_NORM = _aten.rms_norm.default
_WIDEST = 256
"""The most columns of a head that flash attention takes."""


def kernel_of(op: Any) -> Any:
    """The function for an op in a dry run: the op itself, or a GPU's in its place."""
    return _KERNELS.get(op, op) if of_gpus() else op


def gpu_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """aten.dropout by a GPU's kernel."""
    if not train or not 0 < p < 1:
        return _as_tensor(_DROPOUT(x, p, train))
    return _as_tensor(_aten.native_dropout.default(x, p, train)[0])


def gpu_rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """aten.rms_norm as a GPU keeps it.

    Its kernel runs on GPUs only. A layer norm without a bias stands for it: it keeps the same, and
    a second number a row.
    """
    if x.is_complex() or (weight is not None and weight.dtype != x.dtype):
        return _as_tensor(_RMS_NORM(x, shape, weight, eps))
    small = torch.finfo(x.dtype).eps if eps is None else eps
    return _as_tensor(_aten.native_layer_norm.default(x, shape, weight, None, small)[0])


def gpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """aten.scaled_dot_product_attention by a GPU's kernel, written out where there is none.

    Args: query [b, h, s, d], key [b, h, t, d], value [b, h, t, e].
    """
    width, mask_learns = query.shape[-1], attn_mask is not None and attn_mask.requires_grad
    alike = width == value.shape[-1]
    if query.ndim == 4 and (dropout_p or mask_learns or not alike):
        if attn_mask is None and alike and query.dtype.itemsize == 2 and width <= _WIDEST:
            flash = _aten._scaled_dot_product_flash_attention.default
            return _as_tensor(flash(query, key, value, dropout_p, is_causal, scale=scale)[0])
        aligned = all(size * query.dtype.itemsize % 16 == 0 for size in (width, value.shape[-1]))
        if aligned and not enable_gqa:
            efficient = _aten._scaled_dot_product_efficient_attention.default
            bias = None if attn_mask is None else _bias(attn_mask, query, key)
            result = efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)
            return _as_tensor(result[0])
    given = query, key, value, attn_mask, dropout_p, is_causal
    return _as_tensor(_ATTENTION(*given, scale=scale, enable_gqa=enable_gqa))


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The tensor that is added to the scores [b, h, s, t]; a boolean mask becomes a new one."""
    if mask.dtype == torch.bool:
        mask = mask.to(query.dtype)
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _as_tensor(result: Any) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def _under_autocast(op: Any, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A replacement of an op, called in the dtypes in which the op computes."""

    @wraps(kernel)
    def computed(*args: Any, **kwargs: Any) -> Tensor:
        args_, kwargs_ = cast(op, args, kwargs)
        return kernel(*args_, **kwargs_)

    return computed


_KERNELS: Mapping[Any, Callable[..., Tensor]] = {
    op: _under_autocast(op, kernel)
    for op, kernel in (
        (_DROPOUT, gpu_dropout),
        (_RMS_NORM, gpu_rms_norm),
        (_ATTENTION, gpu_attention),
    )
}
