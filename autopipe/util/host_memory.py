"""How a process holds host memory: freed pages stay mapped (mallopt), whole models come in turn.

By default glibc returns freed memory to the kernel and gets it back page by page: each step of
training touches all of its activations and gradients as if for the first time. In a virtual machine
a fault of 4 KiB took 1.9 us, 300 of the 1100 ms of a step of the mini-GPT (`benchmarks/honesty`).
Each step needs as much memory as the one before, so no kept page stays unused.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD (malloc.h)."""

KEPT = 2**30
"""Bytes: free memory below this limit, and smaller allocations, stay in the heap."""

_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Environment variables that show a user's own choice of these settings or of the allocator."""


def keep() -> bool:
    """Keep freed memory from now on; False if the C library cannot or the user chose otherwise."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is None or any(name in os.environ for name in _OWN):
        return False
    return all(mallopt(name, KEPT) for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))


@contextmanager
def in_turn() -> Iterator[None]:
    """Let one process of this machine and user at a time hold a whole model in host memory."""
    path = Path(tempfile.gettempdir()) / f"autopipe-{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
