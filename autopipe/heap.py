"""Freed memory stays with the process: what a CPU rank asks of the C library before it trains.

By itself glibc gives freed memory back to the kernel and takes it again page by page: each step of
training touches all of its activations and gradients as if for the first time. In a virtual machine
a fault of 4 KiB took 1.9 us, 300 of the 1100 ms of a step of the mini-GPT (`benchmarks/honesty`).
A step holds as much as the one before, so that nothing is kept that is not used again.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD (malloc.h)."""

KEPT = 2**30
"""Bytes: free memory below, and allocations that are smaller, stay in the heap."""

_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Variables by which a user has decided it by hand, or has another allocator."""


def keep() -> bool:
    """Keep freed memory from now on; whether this C library does, and nobody has said otherwise."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is None or any(name in os.environ for name in _OWN):
        return False
    return all(mallopt(name, KEPT) for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))
