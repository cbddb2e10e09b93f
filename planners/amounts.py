"""Bytes, seconds and shares as a person reads them."""

from __future__ import annotations

import math


class Amount:
    """Prints bytes in one unit: the largest of which `scale` bytes are at least one."""

    def __init__(self, scale: int) -> None:
        sizes = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
        fitting = (name for name, size in sizes.items() if scale >= size)
        self.unit = next(fitting, "bytes")
        self.size = sizes.get(self.unit, 1)

    def __call__(self, size: float) -> str:
        """The bare number: `18.3`."""
        return f"{size / self.size:.1f}" if self.size > 1 else f"{size:.0f}"

    def of(self, size: float) -> str:
        """The number and its unit: `18.3 GiB`."""
        return f"{self(size)} {self.unit}"

    def ceiling(self, size: int) -> str:
        """As `of`, but rounded up, so that what is printed is enough."""
        return self.of(math.ceil(10 * size / self.size) * self.size / 10)


def percent(ratio: float) -> str:
    """`0.3 %`, `12 %`."""
    return f"{100 * max(ratio, 0.0):.{1 if ratio < 0.0995 else 0}f} %"  # never -0.0 %


def duration(seconds: float) -> str:
    """Three digits and a unit: `12.3 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
