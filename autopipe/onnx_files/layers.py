"""Products, convolutions, pools, norms, attention and losses (onnx.ai/onnx/operators)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopipe.onnx_files.values import Function, NodeOf, Value, as_tensor, ints


def _given(inputs: Sequence[Value], place: int) -> Tensor | None:
    value = inputs[place] if len(inputs) > place else None
    return None if value is None else as_tensor(value)


def _gemm(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    """alpha * A' B' + beta * C, as a linear layer where it is one."""
    left, right = as_tensor(inputs[0]), as_tensor(inputs[1])
    alpha, beta, bias = node.get("alpha", 1.0), node.get("beta", 1.0), _given(inputs, 2)
    left = left.t() if node.get("transA", 0) else left
    plain = bias is None or (beta == 1.0 and bias.ndim == 1)
    if node.get("transB", 0) and alpha == 1.0 and plain:
        return F.linear(left, right, bias)
    made = left @ (right.t() if node.get("transB", 0) else right)
    made = made if alpha == 1.0 else alpha * made
    if bias is None:
        return made
    return made + (bias if beta == 1.0 else beta * bias)


def _padding(node: NodeOf, x: Tensor, kernel: Sequence[int], value: float = 0.0) -> Tensor:
    """A convolution's or a pool's input, padded."""
    dims, dilations = len(kernel), node.get("dilations", [1] * len(kernel))
    strides, auto = node.get("strides", [1] * dims), node.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        begins, ends = [], []
        for size, k, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
            reach = (k - 1) * dilation + 1
            missing = max((-(-size // stride) - 1) * stride + reach - size, 0)
            half = missing // 2
            small, large = half, missing - half
            begins.append(small if auto == "SAME_UPPER" else large)
            ends.append(large if auto == "SAME_UPPER" else small)
        pads = [*begins, *ends]
    else:
        pads = list(node.get("pads", [0] * 2 * dims))
    if not any(pads):
        return x
    # torch lists (begin, end) of each dim, the last dim first.
    order = [pads[dim + end * dims] for dim in reversed(range(dims)) for end in (0, 1)]
    return F.pad(x, order, value=value)


_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}
_MAX_POOLS: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_MEAN_POOLS: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _symmetric(node: NodeOf, dims: int) -> list[int] | None:
    """Pads that are equal on both ends, which torch's ops take; None: they are not."""
    pads = node.get("pads", [0] * 2 * dims)
    auto = node.get("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    return list(pads[:dims]) if auto and list(pads[:dims]) == list(pads[dims:]) else None


def _pool_pads(node: NodeOf, kernel: Sequence[int]) -> list[int] | None:
    """`_symmetric` for a pool; torch pads a pool by at most half of its kernel."""
    pads = _symmetric(node, len(kernel))
    fits = pads is not None and all(2 * pad <= k for pad, k in zip(pads, kernel, strict=True))
    return pads if fits else None


def _conv(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    x, weight, dims = as_tensor(inputs[0]), as_tensor(inputs[1]), as_tensor(inputs[1]).ndim - 2
    pads = _symmetric(node, dims)
    if pads is None:
        x = _padding(node, x, weight.shape[2:])
    return _CONVOLUTIONS[dims](
        x,
        weight,
        _given(inputs, 2),
        stride=tuple(node.get("strides", [1] * dims)),
        padding=tuple(pads or [0] * dims),
        dilation=tuple(node.get("dilations", [1] * dims)),
        groups=node.get("group", 1),
    )


def _conv_transpose(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    weight = as_tensor(inputs[1])
    dims = weight.ndim - 2
    pads = _symmetric(node, dims)
    if pads is None or node.get("output_shape") is not None:
        raise node.refuse("unlike pads at both ends, or output_shape, are not read")
    return _TRANSPOSED[dims](
        as_tensor(inputs[0]),
        weight,
        _given(inputs, 2),
        stride=tuple(node.get("strides", [1] * dims)),
        padding=tuple(pads),
        output_padding=tuple(node.get("output_padding", [0] * dims)),
        groups=node.get("group", 1),
        dilation=tuple(node.get("dilations", [1] * dims)),
    )


def _max_pool(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    x, kernel = as_tensor(inputs[0]), node.get("kernel_shape")
    if node.read > 1:
        raise node.refuse("the places of the largest entries are not read")
    dims, pads = len(kernel), _pool_pads(node, kernel)
    if pads is None:
        x = _padding(node, x, kernel, float("-inf"))
    return _MAX_POOLS[dims](
        x,
        tuple(kernel),
        tuple(node.get("strides", [1] * dims)),
        tuple(pads or [0] * dims),
        tuple(node.get("dilations", [1] * dims)),
        ceil_mode=bool(node.get("ceil_mode", 0)),
    )


def _mean_pool(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    x, kernel = as_tensor(inputs[0]), node.get("kernel_shape")
    dims, pads = len(kernel), _pool_pads(node, kernel)
    if pads is None or node.get("dilations", [1] * dims) != [1] * dims:
        raise node.refuse("unlike or large pads, or dilations, are not read")
    return _MEAN_POOLS[dims](
        x,
        tuple(kernel),
        tuple(node.get("strides", [1] * dims)),
        tuple(pads),
        ceil_mode=bool(node.get("ceil_mode", 0)),
        count_include_pad=bool(node.get("count_include_pad", 0)),
    )


def _over_all(function: Callable[..., Tensor]) -> Function:
    """A pool over all dims but rows and channels."""

    def compute(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
        x = as_tensor(inputs[0])
        return function(x, tuple(range(2, x.ndim)), keepdim=True)

    return compute


def _batch_norm(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    x, scale, shift, mean, variance = map(as_tensor, inputs)
    if node.get("training_mode", 0):
        raise node.refuse(
            "batch norm in training mode, whose running figures are results, is not read",
            "export the model in evaluation mode",
        )
    eps = node.get("epsilon", 1e-5)
    if not mean.requires_grad and not variance.requires_grad:
        return F.batch_norm(x, mean, variance, scale, shift, eps=eps)
    # Earlier nodes computed these from this batch: torch's own op has no gradients for them.
    mean, variance, scale, shift = (
        each.reshape(-1, *[1] * (x.ndim - 2)) for each in (mean, variance, scale, shift)
    )
    return (x - mean) * torch.rsqrt(variance + eps) * scale + shift


def _layer_norm(node: NodeOf, inputs: Sequence[Value]) -> Any:
    x, eps = as_tensor(inputs[0]), node.get("epsilon", 1e-5)
    axis = node.get("axis", -1) % x.ndim
    scale, shift = as_tensor(inputs[1]), _given(inputs, 2)
    shape, dims = x.shape[axis:], tuple(range(axis, x.ndim))
    shift = None if shift is None else shift.expand(shape)
    made = F.layer_norm(x, shape, scale.expand(shape), shift, eps)
    if node.read == 1:
        return made
    mean, variance = x.mean(dims, keepdim=True), x.var(dims, correction=0, keepdim=True)
    return made, mean, torch.rsqrt(variance + eps)


def _rms_norm(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    x, scale = as_tensor(inputs[0]), as_tensor(inputs[1])
    axis = node.get("axis", -1) % x.ndim
    return F.rms_norm(x, x.shape[axis:], scale, node.get("epsilon", 1e-5))


def _group_norm(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    x, scale, shift = map(as_tensor, inputs)
    groups, channels = node.get("num_groups"), x.shape[1]
    if scale.shape[0] != channels:  # of a group, before op set 21
        scale, shift = (t.repeat_interleave(channels // groups) for t in (scale, shift))
    return F.group_norm(x, groups, scale, shift, node.get("epsilon", 1e-5))


def _instance_norm(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    x, scale, shift = map(as_tensor, inputs)
    return F.instance_norm(x, weight=scale, bias=shift, eps=node.get("epsilon", 1e-5))


def _dropout(node: NodeOf, inputs: Sequence[Value]) -> Any:
    """In evaluation, as files are exported, nothing is dropped."""
    if node.read > 1:
        raise node.refuse("the mask of a dropout as a result is not read")
    if len(inputs) > 2 and inputs[2] is not None and bool(as_tensor(inputs[2])):
        ratio = _given(inputs, 1)
        return F.dropout(as_tensor(inputs[0]), 0.5 if ratio is None else ratio.item())
    return as_tensor(inputs[0])


def _attention(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    """Attention of op set 23: (rows, heads, tokens, width), or (rows, tokens, heads * width)."""
    q, k, v = (as_tensor(value) for value in inputs[:3])
    mask = _given(inputs, 3)
    if node.read > 1 or any(value is not None for value in inputs[4:]) or node.get("softcap", 0):
        raise node.refuse("attention with a cache, its scores as results or a soft cap is not read")
    flat = q.ndim == 3
    if flat:
        heads, kv_heads = node.get("q_num_heads"), node.get("kv_num_heads")
        q = _heads(q, heads)
        k, v = _heads(k, kv_heads), _heads(v, kv_heads)
    causal = bool(node.get("is_causal", 0))
    if causal and mask is not None:  # torch takes one of the two
        sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask = mask & sees if mask.dtype == torch.bool else mask.masked_fill(~sees, -torch.inf)
    made = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=node.get("scale"),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return made.transpose(1, 2).flatten(2) if flat else made


def _heads(x: Tensor, heads: int) -> Tensor:
    rows, tokens, width = x.shape
    return x.reshape(rows, tokens, heads, width // heads).transpose(1, 2)


def _einsum(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    return torch.einsum(node.get("equation"), *map(as_tensor, inputs))


def _cross_entropy(function: Callable[..., Tensor]) -> Function:
    def compute(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
        if node.read > 1:
            raise node.refuse("the logarithms of a loss as a result are not read")
        return function(
            as_tensor(inputs[0]),
            as_tensor(inputs[1]),
            weight=_given(inputs, 2),
            ignore_index=node.get("ignore_index", -100),
            reduction=node.get("reduction", "mean"),
        )

    return compute


def _product(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    return torch.matmul(as_tensor(inputs[0]), as_tensor(inputs[1]))


def _scaled(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    return F.normalize(as_tensor(inputs[0]), node.get("p", 2), node.get("axis", -1))


def _centered(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    x, axes = as_tensor(inputs[0]), tuple(node.get("axes", (0, 2, 3)))
    off = x - x.mean(axes, keepdim=True)
    return off / (off.square().mean(axes, keepdim=True).sqrt() + 1e-9)


def _fourier(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    """Real or complex numbers, in a last dim of 1 or 2, to complex ones (or back), in one of 2."""
    x, back, half = as_tensor(inputs[0]), node.get("inverse", 0), node.get("onesided", 0)
    length = ints(node, inputs[1])[0] if len(inputs) > 1 and inputs[1] is not None else None
    axis = node.get("axis", 1) if node.version < 20 else -2
    if len(inputs) > 2 and inputs[2] is not None:
        axis = ints(node, inputs[2])[0]
    axis = int(axis) % x.ndim
    made: Tensor
    if half and back:
        made = torch.fft.irfft(torch.view_as_complex(x.contiguous()), length, axis)
        return made.unsqueeze(-1)
    if x.shape[-1] == 1:
        made = (torch.fft.rfft if half else torch.fft.fft)(x.squeeze(-1), length, axis)
    else:
        function = torch.fft.ifft if back else torch.fft.fft
        made = function(torch.view_as_complex(x.contiguous()), length, axis)
    return torch.view_as_real(made)


def _rotary(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    """Rotated pairs of queries or keys, (rows, heads, tokens, width) or (rows, tokens, all)."""
    x, cos, sin = map(as_tensor, inputs[:3])
    flat = x.ndim == 3
    x = _heads(x, node.get("num_heads")) if flat else x
    if len(inputs) > 3 and inputs[3] is not None:  # the places of tokens in a table
        cos, sin = cos[as_tensor(inputs[3])], sin[as_tensor(inputs[3])]
    turned = node.get("rotary_embedding_dim", 0) or x.shape[-1]
    own, rest = x[..., :turned], x[..., turned:]
    paired = bool(node.get("interleaved", 0))
    left, right = (own[..., 0::2], own[..., 1::2]) if paired else own.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    halves = cos * left - sin * right, sin * left + cos * right
    made = torch.stack(halves, -1).flatten(-2) if paired else torch.cat(halves, -1)
    made = torch.cat([made, rest], -1)
    return made.transpose(1, 2).flatten(2) if flat else made


LAYERS: dict[str, Function] = {
    "MatMul": _product,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _max_pool,
    "AveragePool": _mean_pool,
    "GlobalAveragePool": _over_all(torch.mean),
    "GlobalMaxPool": _over_all(torch.amax),
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "Dropout": _dropout,
    "Attention": _attention,
    "DFT": _fourier,
    "RotaryEmbedding": _rotary,
    "LpNormalization": _scaled,
    "MeanVarianceNormalization": _centered,
    "SoftmaxCrossEntropyLoss": _cross_entropy(F.cross_entropy),
    "NegativeLogLikelihoodLoss": _cross_entropy(F.nll_loss),
}
