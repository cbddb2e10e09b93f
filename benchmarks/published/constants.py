"""What the package's model does not know of the programs that published the runs: few constants.

Each has a value that one would expect who has seen no run, `EXPECTED`. `fit.py` fits them to the
runs and writes `fitted.json`: once to all sources, and for each source to all the others, so that
no source is predicted with what was fitted to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FITTED = Path(__file__).with_name("fitted.json")
"""Constants by the source that they were fitted without; those under `""` were fitted to all."""


@dataclass(frozen=True)
class Constants:
    """Shares of rates, seconds and bytes.

    Args:
        steady, steady_newer: the share of a matmul's measured rate that a device holds all through
            a run: up to A100, and from H100 on. `cluster.datasheets` has the ones fitted to all.
        flash, flash1: the rate of FlashAttention, and of its first version, as a share of a
            matmul's, forward and backward together.
        flash_newer: that share again on H100 and later, whose own instructions they do not use.
        misaligned: a matmul one of whose dims is divided by 2^k, but not by 2^(k+1), runs at
            (2^k / 64)^misaligned of the rate of one whose dims are multiples of 64.
        gradients: the share of its links that a sum of gradients reaches.
        wait: seconds for which 8 tensor-parallel ranks wait for each other before each sum, and of
            t ranks (t - 1) / 7 of it, in programs built on DeepSpeed; Megatron-LM's do not.
        fragmented: what the allocator has reserved and cannot use, as a share of what is allocated.
        context: GiB of CUDA's context, of libraries and of NCCL's buffers, which no tensor has.
    """

    steady: float = 1.0
    steady_newer: float = 1.0
    flash: float = 0.6
    flash1: float = 0.35
    flash_newer: float = 0.55
    misaligned: float = 0.1
    gradients: float = 1.0
    wait: float = 5e-4
    fragmented: float = 0.05
    context: float = 2.0


EXPECTED = Constants()
"""Nothing is lost, but where others have measured: FlashAttention-2 with a causal mask reaches
about 0.6 of what A100 holds in matmuls, its first version 0.35, and on H100 335 of 600 TFLOP/s
(Dao 2023, arXiv:2307.08691, figures 4 to 7)."""


@cache
def fitted(without: str = "") -> Constants:
    """The constants fitted to all sources but this one; to all if it was not among them."""
    found = json.loads(FITTED.read_text())
    return Constants(**found.get(without, found[""]))
