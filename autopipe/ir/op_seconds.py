"""Compute the seconds of each node on a device from its cost formulas.

Time is a roofline (Williams, Waterman, Patterson, CACM 2009): the slower of computing and moving,
and at least what the host needs to launch an op.

    seconds = max(flops / rate, bytes / bandwidth) + launches * launch

A matmul of (m, k) @ (k, n) reaches less than the rate the smaller it is, tiles staying empty at its
edges. With h the size of a dim at which the rate is half,

    rate = flops a second * m / (m + h) * k / (k + h) * n / (n + h)

which is Hockney's half-performance length (Parallel Computing 1985) in each dim. The matmuls of an
op's backward have the same three dims. Backward also accumulates gradients of parameters: two
tensors are read and one is written.

    seconds = ... + 3 * gradients / bandwidth

That holds from the second micro-batch on. The first one writes its gradients to memory that is in
no cache; the same cost is used for it. A gradient in 16 bits that is added to a sum in fp32 is cast
before, by a kernel of its own.

The passes of elementwise kernels within an op that multiplies come on top, at the bandwidth.

Measured ops (`Device.kernels`) use their own start-up seconds instead of launches, and their own
rate instead of a matmul's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import sympy
import torch
from numpy.typing import NDArray

from autopipe.cluster.cluster import Device, Kernel
from autopipe.cluster.measured import ATTENTIONS, KERNELS, LIKE, kernel_in
from autopipe.errors import AutopipeError
from autopipe.ir.graph import BATCH, Dim
from autopipe.ir.op_costs import NodeCost
from autopipe.util import dtypes as dtype_names


def reached(dims: Sequence[Any], half: float) -> Any:
    """The fraction of its peak rate that a device reaches in a matmul of these dims.

    `dims` are numbers or formulas; the fraction is 1 if `dims` is empty. A product with a dim of 0
    multiplies nothing, at any rate.
    """
    return math.prod(dim / (dim + half) for dim in dims if dim != 0)


_RATE = {
    **dict.fromkeys((torch.float32, torch.complex64), "fp32"),
    **dict.fromkeys((torch.float64, torch.complex128), "fp64"),
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
"""The key of `Device.flops` for each dtype. Integers count as fp32: they index and mask."""


def rate_name(dtype: torch.dtype) -> str:
    """The key of `Device.flops` for matrix products in `dtype`.

    Another dtype (of 8 bits) is its own key, which a cluster file can define.
    """
    return _RATE.get(dtype, dtype_names.name_of(dtype) if dtype.is_floating_point else "fp32")


def seconds(
    formulas: Sequence[NodeCost],
    rows: int,
    device: Device,
    dtypes: Sequence[torch.dtype] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Forward and backward seconds of every node with micro-batches of `rows` rows.

    Args:
        dtypes: the dtype in which each node computes; None: the dtypes of the graph.

    Raises:
        AutopipeError: the device has no rate for a dtype of the model's matrix products, or has a
            measured rate for an unknown op.
    """
    timed = _timed(formulas, rows, device, dtypes)
    return (
        timed.forward + timed.starts[0],
        timed.backward + timed.adding + timed.starts[1],
    )


def parts(
    formulas: Sequence[NodeCost],
    rows: int,
    device: Device,
    dtypes: Sequence[torch.dtype] | None = None,
) -> NDArray[np.float64]:
    """The seconds of every node, forward and backward together, by what they go to.

    Returns shape (3, nodes): multiplying matrices; other ops, and gradients that are accumulated;
    the host's launches. The sum over the first dim is that of `seconds`.
    """
    timed = _timed(formulas, rows, device, dtypes)
    multiplies = np.array([cost.model_flops != 0 for cost in formulas], bool)
    working = timed.forward + timed.backward
    return np.stack(
        [
            np.where(multiplies, working, 0.0),
            np.where(multiplies, 0.0, working) + timed.adding,
            timed.starts[0] + timed.starts[1],
        ]
    )


def model_flops(formulas: Sequence[NodeCost], rows: int) -> NDArray[np.float64]:
    """For each node the operations that MFU counts, forward and backward, at `rows` rows."""
    return _evaluate([cost.model_flops for cost in formulas], rows)


class Roof(NamedTuple):
    """Seconds of a node as formulas in rows, and in tokens if those are a symbol:
    max(computing, moving) + besides."""

    computing: Dim
    moving: Dim
    besides: Dim


def roofs(
    formulas: Sequence[NodeCost], device: Device, dtypes: Sequence[torch.dtype] | None = None
) -> list[tuple[Roof, Roof]]:
    """Forward and backward seconds of every node as formulas, whose values are those of `seconds`.

    Args and raises: as `seconds`.
    """
    _check_kernels(device.kind, tuple(device.kernels))
    dtypes = dtypes or [cost.dtype for cost in formulas]
    rates = np.array([_rate(device, d, c) for d, c in zip(dtypes, formulas, strict=True)])
    shares = np.array([_share(cost.dims, device.half) for cost in formulas], object)
    paces = _paces(formulas, dtypes, device, rates, rates * shares)
    found = []
    for cost, forward_start, forward_rate, backward_start, backward_rate in zip(
        formulas, *paces, strict=True
    ):
        ways = (
            (cost.forward_flops / forward_rate, cost.forward_bytes, cost.passes[0], forward_start),
            (
                cost.backward_flops / backward_rate,
                cost.backward_bytes,
                cost.passes[1] + _added(cost),
                backward_start,
            ),
        )
        forward, backward = (
            Roof(computing, moved / device.bandwidth, besides / device.bandwidth + start)
            for computing, moved, besides, start in ways
        )
        found.append((forward, backward))
    return found


class _Timed(NamedTuple):
    """Seconds of every node: computing or moving, accumulating gradients, launches both ways."""

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    adding: NDArray[np.float64]
    starts: tuple[NDArray[np.float64], NDArray[np.float64]]


def _timed(
    formulas: Sequence[NodeCost],
    rows: int,
    device: Device,
    dtypes: Sequence[torch.dtype] | None,
) -> _Timed:
    """The seconds of `seconds`, before its parts are added."""
    _check_kernels(device.kind, tuple(device.kernels))
    forward_flops, forward_bytes, backward_flops, backward_bytes = (
        _evaluate([getattr(cost, name) for cost in formulas], rows)
        for name in ("forward_flops", "forward_bytes", "backward_flops", "backward_bytes")
    )
    dtypes = dtypes or [cost.dtype for cost in formulas]
    shares = _evaluate([_share(cost.dims, device.half) for cost in formulas], rows)
    rates = np.array([_rate(device, d, c) for d, c in zip(dtypes, formulas, strict=True)])
    forward_starts, forward_rates, backward_starts, backward_rates = _paces(
        formulas, dtypes, device, rates, rates * shares
    )
    forward_passes, backward_passes = (
        _evaluate([cost.passes[way] for cost in formulas], rows) / device.bandwidth
        for way in (0, 1)
    )
    forward = np.maximum(forward_flops / forward_rates, forward_bytes / device.bandwidth)
    backward = np.maximum(backward_flops / backward_rates, backward_bytes / device.bandwidth)
    return _Timed(
        forward + forward_passes,
        backward + backward_passes,
        _evaluate([_added(cost) for cost in formulas], rows) / device.bandwidth,
        (forward_starts, backward_starts),
    )


ADDING = 3
"""How often a gradient's bytes move when it is accumulated: two reads and one write."""


def _added(cost: NodeCost) -> Dim:
    """Bytes that move where the gradients of parameters are cast and accumulated."""
    return ADDING * cost.gradients + cost.casts[1]


@lru_cache(maxsize=64)
def _check_kernels(device: str, names: tuple[str, ...]) -> None:
    """Refuse measured rates with an unknown op's name, which would be ignored silently."""
    attention = "scaled_dot_product_attention"
    for name in names:
        if name in LIKE or name == attention:
            words = repr(LIKE[name]) if name in LIKE else "one of " + ", ".join(ATTENTIONS)
            why, hint = f"is counted as {words}", f"give the pace of {words} in its place"
        elif name in KERNELS or hasattr(torch.ops.aten, name):
            continue
        else:
            why, hint = "is no op", f"write an op of torch.ops.aten, or one of {', '.join(KERNELS)}"
        raise AutopipeError(
            f"cluster: {device} has a pace of {name!r} among its kernels, which {why}", hint=hint
        )


def _paces(
    formulas: Sequence[NodeCost],
    dtypes: Sequence[torch.dtype],
    device: Device,
    rates: NDArray[np.float64],
    matmuls: NDArray[np.float64],
) -> tuple[NDArray[np.float64], ...]:
    """Start-up seconds and rates of each node, forward and backward, which also casts gradients.

    A kernel's measured rate is for fp32. In another dtype, a kernel that multiplies matrices has a
    rate of its own (`measured.kernel_in`), or gets the speed-up of a matmul; any other is as fast
    in 16 bits as in 32, to which a CPU converts it, and half as fast in 64.
    """
    measured = [_measured(device, *pair) for pair in zip(formulas, dtypes, strict=True)]
    found = []
    for way in (0, 1):
        starts = np.array([cost.launches[way] * device.launch for cost in formulas])
        node_rates = matmuls.copy()
        for number, cost in enumerate(formulas):
            kernel, in_dtype = measured[number]
            if kernel is None or not cost.launches[way]:
                continue
            pace = kernel.backward if way else kernel.forward
            starts[number] = pace.start
            if pace.rate and in_dtype:
                node_rates[number] = pace.rate
            elif pace.rate and cost.dims:
                node_rates[number] = (
                    pace.rate * rates[number] / device.flops.get("fp32", rates[number])
                )
            elif pace.rate:
                node_rates[number] = pace.rate * min(1.0, 4 / cost.dtype.itemsize)
        if way:
            starts += [cost.casts[0] * device.launch for cost in formulas]
        found += [starts, node_rates]
    return tuple(found)


def _measured(device: Device, cost: NodeCost, dtype: torch.dtype) -> tuple[Kernel | None, bool]:
    """The measured pace of a node's kernel, and whether it is one of another dtype than fp32."""
    name = kernel_in(cost.kernel, rate_name(dtype))
    if name != cost.kernel and name in device.kernels:
        return device.kernels[name], True
    return device.kernels.get(cost.kernel), False


@lru_cache(maxsize=2**12)
def _share(dims: tuple[Dim, ...], half: float) -> Dim:
    """`reached` as a formula; one object for all nodes with the same dims."""
    found: Dim = reached(dims, half)
    return found


def _rate(device: Device, dtype: torch.dtype, cost: NodeCost) -> float:
    """Without a matmul the rate hardly matters: fp32's rate is used for any dtype."""
    name = rate_name(dtype)
    if name not in device.flops and not multiplies(cost):
        name = "fp32" if "fp32" in device.flops else next(iter(device.flops))
    if name not in device.flops:
        raise AutopipeError(
            f"the model computes in {name}, and {device.kind} has no rate for it, only for "
            f"{', '.join(device.flops)}",
            hint=f"add {name!r} to the device's flops in the cluster file",
        )
    # A product of complex numbers is four of real ones.
    return device.flops[name] / (4 if dtype.is_complex and multiplies(cost) else 1)


def multiplies(cost: NodeCost) -> bool:
    """Whether an op is a product: its seconds are by the rate of its dtype."""
    return bool(cost.dims) or cost.model_flops != 0


def _evaluate(formulas: Sequence[Dim], rows: int) -> NDArray[np.float64]:
    """Evaluate the formulas at `rows`; equal ones, common in a deep model, only once."""
    number: dict[Dim, int] = {}
    numbers = [number.setdefault(formula, len(number)) for formula in formulas]
    values = _compiled(tuple(number))(rows)
    return np.array([float(value) for value in values])[numbers]


@lru_cache(maxsize=64)
def _compiled(formulas: tuple[Dim, ...]) -> Callable[[int], list[float]]:
    """Compile formulas to a Python function of the number of rows."""
    compiled: Callable[[int], list[float]] = sympy.lambdify(BATCH, list(formulas), "math")
    return compiled
