"""Host memory: how much a process may have, how it keeps freed pages, whole models one at a time.

    total()        bytes of the machine, or the limit of its container or job
    available()    the free bytes of these
    keep()         freed pages stay mapped (mallopt)
    in_turn()      one process of the machine at a time

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
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

SYSTEM = Path("/")
"""Where Linux keeps `proc` and `sys`."""

_FILES = {
    "2": ("memory.max", "memory.current", "inactive_file"),
    "1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Of a control group its limit, what is used, and the pages of files that the kernel gives back
before it kills anybody; by version (Linux, admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst)."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD (malloc.h)."""

KEPT = 2**30
"""Bytes: free memory below this limit, and smaller allocations, stay in the heap."""

_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Environment variables that show a user's own choice of these settings or of the allocator."""


def total() -> int:
    """Bytes of this machine's memory, or this process's limit where that is lower."""
    return min([_physical(), *(limit for limit, _ in _limits())])


def available() -> int:
    """Bytes that this process can have without swapping; `total` where no system says (macOS)."""
    free = [limit - used for limit, used in _limits()]
    for line in _text(SYSTEM / "proc" / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    return max(0, min([_physical(), *free]))


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits() -> Iterator[tuple[int, int]]:
    """Of each control group that this process is in, as containers and Slurm make them: the bytes
    that it may have, and those that it has.

    A container does not see where in the host's tree it stands: it finds the root alone.
    """
    for line in _text(SYSTEM / "proc" / "self" / "cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = SYSTEM / "sys" / "fs" / "cgroup" / ("memory" if controllers else "")
        most, now, idle = _FILES["1" if controllers else "2"]
        own = PurePosixPath(place)
        for folder in (root / above.relative_to("/") for above in (own, *own.parents)):
            stat = dict(pair.split() for pair in _text(folder / "memory.stat").splitlines())
            with suppress(ValueError):  # no such group here, or no limit: `max`
                limit, used = int(_text(folder / most)), int(_text(folder / now))
                yield limit, used - int(stat.get(idle, 0))


def _text(path: Path) -> str:
    """The text of a file of the system; empty if there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def keep() -> bool:
    """Make the C library keep freed memory for reuse, from now on.

    Returns False if it is not glibc, or if the user has set one of its variables (`_OWN`).
    """
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
