"""A run's loss by steps, as a line and its axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_POINTS = 600
"""Points of a line: of more steps those that are evenly apart, and the last."""

ROWS = 12
"""Rows of the table beside the picture."""


@dataclass(frozen=True)
class Curve:
    """A loss.

    Attributes:
        line: the d of an SVG path, x and y from 0 to 1000.
        first, last, low, high: losses as texts; steps from `begin` to `end`.
        rows: some of the steps with their losses, as texts.
    """

    line: str
    first: str
    last: str
    low: str
    high: str
    begin: int
    end: int
    rows: tuple[tuple[str, str], ...]


def of_metrics(metrics: Sequence[dict[str, float]]) -> Curve | None:
    """The curve of a run's metrics; None where fewer than two steps have a loss."""
    known = [(m["step"], m["loss"]) for m in metrics if "step" in m and "loss" in m]
    known = [pair for pair in known if math.isfinite(pair[1])]
    if len(known) < 2:
        return None
    points = _some(known, MOST_POINTS)
    (begin, _), (end, _) = points[0], points[-1]
    losses = [loss for _, loss in known]
    low, high = min(losses), max(losses)
    wide, tall = (end - begin) or 1.0, (high - low) or 1.0
    line = "L".join(
        f"{1000 * (step - begin) / wide:.1f} {1000 - 1000 * (loss - low) / tall:.1f}"
        for step, loss in points
    )
    first, last, least, most = (f"{loss:.4g}" for loss in (losses[0], losses[-1], low, high))
    table = tuple((f"{step:.0f}", f"{loss:.4g}") for step, loss in _some(known, ROWS))
    return Curve(f"M{line}", first, last, least, most, int(begin), int(end), table)


def _some(points: Sequence[tuple[float, float]], most: int) -> Sequence[tuple[float, float]]:
    if len(points) <= most:
        return points
    last = len(points) - 1
    return [points[round(at * last / (most - 1))] for at in range(most)]
