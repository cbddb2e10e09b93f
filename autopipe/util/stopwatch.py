"""Measure wall seconds by the name of the work.

watch = Stopwatch()
with watch("traced"):
    ...
str(watch)      ->  "traced 3.1 s, costs 2.0 s"
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Wall seconds by name, in the order of first use."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`; blocks of one name may repeat, but not nest."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - begun)

    def add(self, name: str, seconds: float) -> None:
        """Add `seconds` to the total of `name`."""
        self.seconds[name] += seconds
