"""Format bytes, seconds, shares and counts for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_SIZES = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


class Amount:
    """Formats bytes in one unit: the largest unit that is at most `scale` bytes."""

    def __init__(self, scale: float) -> None:
        fitting = (name for name, size in _SIZES.items() if scale >= size)
        self.unit = next(fitting, "bytes")
        self.size = _SIZES.get(self.unit, 1)

    def __call__(self, size: float) -> str:
        """The number without its unit: `18.3`."""
        return f"{size / self.size:.1f}" if self.size > 1 else f"{size:.0f}"

    def of(self, size: float) -> str:
        """The number and its unit: `18.3 GiB`."""
        unit = "byte" if self.size == 1 and size == 1 else self.unit
        return f"{self(size)} {unit}"

    def adding_up(self, sizes: Sequence[float]) -> list[str]:
        """The parts of a sum as numbers without units, which add up to the printed sum."""
        return adding_up([size / self.size for size in sizes], 1 if self.size > 1 else 0)

    def ceiling(self, size: int) -> str:
        """As `of`, but rounded up, so that the printed number of bytes is enough."""
        return self.of(math.ceil(10 * size / self.size) * self.size / 10)


def adding_up(parts: Sequence[float], digits: int) -> list[str]:
    """Format the parts of a sum with `digits` digits: the printed parts add up to the printed sum.

    Each part is rounded down; the missing last digits go to the parts with the largest remainders.
    """
    steps = [10**digits * part for part in parts]
    found = [math.floor(step) for step in steps]
    left = round(sum(steps)) - sum(found)
    most_lost = sorted(range(len(steps)), key=lambda n: found[n] - steps[n])
    for number in most_lost[:left]:
        found[number] += 1
    return [f"{step / 10**digits:.{digits}f}" for step in found]


def memory(size: float) -> str:
    """Format bytes in the largest fitting unit: `1 byte`, `640 bytes`, `7.5 MiB`, `43.2 GiB`."""
    return Amount(size).of(size)


def gigabytes(size: float) -> str:
    """Format bytes in powers of ten, as for links: `4.3 GB`, `350.0 MB`."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def seconds(time: float) -> str:
    """Format seconds with three digits and a unit: `263 us`, `1.5 ms`, `2.34 s`, `1,234 s`."""
    if time == 0:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if time >= 0.9995 * size:  # what rounds to 1 of a unit is not 1000 of the one below
            figure = time / size
            return f"{figure:,.0f} {unit}" if figure >= 999.5 else f"{figure:.3g} {unit}"
    return f"{time / 1e-6:.3g} us"


def rate(number: float) -> str:
    """Format a number per second, or per another unit: `8,661`, `32.1`, `0.504`."""
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"


def flops(number: float) -> str:
    """Format operations a second: `989 TFLOP/s`, `55.1 GFLOP/s`."""
    unit, size = ("TFLOP/s", 1e12) if number >= 0.9995e12 else ("GFLOP/s", 1e9)
    return f"{rate(number / size)} {unit}"


VISIBLE = 5e-4
"""The least ratio that `percent` does not print as 0.0 %."""


def percent(ratio: float) -> str:
    """Format a ratio (1.0 is all) as a percentage: `0.3 %`, `12 %`."""
    return f"{100 * max(ratio, 0.0):.{1 if ratio < 0.0995 else 0}f} %"  # never -0.0 %


def count(number: int, one: str, many: str | None = None) -> str:
    """Format a number with its noun: `1 row`, `2 rows`, `16,000 devices`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers, with runs of consecutive ones folded: `0, 2-5, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
