"""The share of datasheet rates and of memory that programs reach.

    floating-point operations a second = datasheet * matmul_share * steady
    bytes a second of memory           = datasheet * MEMORY_SHARE
    bytes a second of a link           = datasheet * LINK_SHARE
    bytes of memory                    = (what torch reports - RESERVE) / (1 + FRAGMENTED)

Each constant says where it comes from: measured by others, fitted to published runs, or assumed.
"""

from __future__ import annotations

MATMUL_SHARE = 0.8
"""Share of the peak that large matmuls reach, if it has not been measured.

Where others have, `Datasheet.matmul_share` has their share, in bf16 and for all dtypes:
https://github.com/stas00/ml-engineering/tree/master/compute/accelerator, table of maximum
achievable matmul FLOPS.
"""

STEADY, STEADY_A100, STEADY_NEWER = 0.82, 0.79, 0.71
"""Share of that rate which matmuls hold all through a training step: the first on H100 and H200 of
700 W, the second on A100, the last on H100 and H200 of less power, and on newer devices.

Power and heat slow the clocks of a device that is never idle. Fitted to published training runs, on
A100 and on H100 of 500 W; benchmarks/published has the errors that are left. One H100 of 700 W,
alone and cool, held 0.92 (benchmarks/gpu), hundreds of them less. Others have the first, for want
of such runs.
"""

BESIDE = 0.189 / 1.189
"""Share of a collective's seconds that computing beside it loses.

The two share a device's processors, memory and power: computing takes 18.9 % longer, the mean over
H100, A100, MI250 and MI210 (Lee et al., 2025, arXiv:2507.03114).
"""

HALF = 64.0
"""The dim that halves a matmul's rate: half a tile of 128. An assumption."""

MEMORY_SHARE = 0.9
"""Share of the memory bandwidth that an elementwise op on large tensors reaches: an assumption."""

LINK_SHARE = 0.88
"""Share of a link's bandwidth that a long transfer reaches.

Measured by others between two H200 over NVLink: 396 of 450 GB/s;
https://github.com/stas00/ml-engineering/tree/master/network. An assumption for the other links.
"""

LAUNCH = 5e-6
"""Seconds that the host needs to put one op on a GPU's queue, from Python: an assumption."""

RESERVE = 2 * 2**30
"""Bytes of a GPU that hold no tensor: CUDA's context, libraries, NCCL's buffers."""

FRAGMENTED = 0.038
"""Bytes that the caching allocator has and cannot use, as a share of tensors' bytes: sizes rounded
up, and gaps that nothing fits into.

Measured by others in 37 runs of Megatron-LM on B200: the median of peak reserved over peak
allocated bytes; from 2.8 to 9.3 %, so that a plan which fills a device may still run out of memory
there (MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.json). `--memory` leaves more.
"""

GIB = 2**30


def usable(memory: float) -> int:
    """Bytes that tensors may hold of the `memory` that torch reports for a GPU."""
    return int((memory - RESERVE) / (1 + FRAGMENTED))
