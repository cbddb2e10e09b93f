"""The roofline: seconds of a kernel from its operations and its bytes.

    seconds = max(flops / rate, bytes / bandwidth) + launches * launch

(Williams, Waterman, Patterson, CACM 2009), where a matmul of (m, k) @ (k, n) reaches less than the
rate the smaller it is, tiles staying empty at its edges. With h the dim that halves the rate,

    rate = flops a second * m / (m + h) * k / (k + h) * n / (n + h)

which is Hockney's half-performance length (Parallel Computing 1985) in each dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopipe.cluster import Device


def reached(dims: Sequence[float], half: float) -> float:
    """The share of its rate at which a device computes a matmul of these dims; 1 of none."""
    return math.prod(dim / (dim + half) for dim in dims)


def kernel_seconds(
    device: Device,
    dtype: str,
    flops: float,
    size: float,
    dims: Sequence[float] = (),
    launches: int = 1,
) -> float:
    """Seconds of `launches` kernels that compute `flops` and move `size` bytes together.

    Args:
        dtype: a key of `device.flops`.
        dims: (m, k, n) if it is a matmul.
    """
    rate = device.flops[dtype] * reached(dims, device.half)
    return max(flops / rate, size / device.bandwidth) + launches * device.launch
