"""Whether a machine was left alone while a case ran: two signs, neither of them the prediction.

*Waiting.* How long a process was ready to run but waited, because another had its core.
Linux counts it (/proc/self/schedstat: nanoseconds run, nanoseconds waited, slices). Under real-time
priority (`chrt -r 1`) it still is up to 0.05: Linux keeps that much for all others
(/proc/sys/kernel/sched_rt_runtime_us).

*Drift.* How much quicker or slower the machine is after the run than before it, by two probes:
caches and memory are shared too, and in a virtual machine with neighbours that nobody sees.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autopipe.cluster.cluster import Device
from autopipe.ir.op_seconds import reached

SCHEDSTAT = Path("/proc/self/schedstat")

WAITED = 0.05
"""The share of a run that a process may have waited for its core."""

DRIFT = 0.10
"""How much slower or faster one probe may be than the one before the run."""


class Waiting:
    """Begins to count; `share()` is of the time since then, in [0, 1]."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = waited(SCHEDSTAT.read_text())

    def share(self) -> float:
        """What this process's main thread has waited for a core since then."""
        now = waited(SCHEDSTAT.read_text())
        return (now - self._before) / (time.monotonic() - self._began)


def waited(schedstat: str) -> float:
    """Seconds of waiting."""
    return int(schedstat.split()[1]) / 1e9


def drift(before: Device, after: Device) -> float:
    """The larger change of the two figures that most of a step depends on, as a ratio - 1."""
    pairs = zip(_figures(before), _figures(after), strict=True)
    return max((now / then - 1 for then, now in pairs), key=abs)


def _figures(device: Device) -> tuple[float, float]:
    """The seconds of a matmul of middling dims, and of moving bytes."""
    rate = device.flops["fp32"] * reached((512, 512, 512), device.half)
    return 2.0 * 512**3 / rate + device.launch, 2.0**26 / device.bandwidth + device.launch


def disturbed(waited: float, drifted: float) -> float:
    """More than 1 if a run is to be done again: the sign that is the farthest beyond its limit."""
    return max(waited / WAITED, abs(drifted) / DRIFT)


@contextmanager
def cores(count: int) -> Iterator[None]:
    """Processes that are started inside have so many cores, as many as there are processes.

    One process on two cores would be measured with the threads of its matmuls, which wait for each
    other whenever another program takes one of the cores.
    """
    had = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(had)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, had)
