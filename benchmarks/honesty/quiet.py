"""How long a process was ready to run and did not: other programs had its core.

Their share is no part of any prediction, so a run with much of it is done again. Linux counts it
(/proc/self/schedstat: nanoseconds run, nanoseconds waited, slices).
"""

from __future__ import annotations

import time
from pathlib import Path

SCHEDSTAT = Path("/proc/self/schedstat")


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
