"""Fit the constants: `python -m benchmarks.published.fit ROWS.csv > benchmarks/published/fitted.json`.

Each source in turn is left out and the constants are fitted to the others; then to all. Devices
that are never fitted are left out of all.

    loss = mean over sources, weighted by sqrt(rows), of mean min(|log(predicted / published)|, 0.4)
         + 0.003 * sum over constants of |log(value / expected)|

so that neither one long table nor many short ones decide, a row that is far off counts as much as
any other such row, and a constant of which the sources say nothing stays what is expected. Each
is multiplied or divided by a factor as long as that helps, in turn, and the factor shrinks. A
pipeline's bubble hardly depends on the constants: its share is simulated once.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopipe.errors import AutopipeError
from benchmarks.published import pipeline
from benchmarks.published.constants import EXPECTED, Constants
from benchmarks.published.machine import NEVER_FITTED, machine_of
from benchmarks.published.rows import Unsupported, read
from benchmarks.published.step import Rank
from benchmarks.published.transformer import parts_of

FAR, PULL = 0.4, 0.003
"""What a row counts at most, and what a constant costs that is e times what is expected."""

TIMES = tuple(f.name for f in dataclasses.fields(Constants) if f.name not in ("fragmented", "context"))
"""Constants of time."""


class Timed(NamedTuple):
    """A rank, its published seconds and how much longer its pipeline's bubble makes them."""

    rank: Rank
    seconds: float
    stretch: float


def main() -> int:
    """Print the constants by the source that is left out."""
    sources: dict[str, list[Timed]] = defaultdict(list)
    with open(sys.argv[1], newline="") as file:
        for row in csv.DictReader(file):
            try:
                run = read(row)
                machine = machine_of(run)
            except (Unsupported, AutopipeError):
                continue
            if run.seconds and NEVER_FITTED not in run.gpu:
                rank = Rank(run, machine, parts_of(run), EXPECTED)
                costs = rank.costs()
                stretch = pipeline.seconds(run, costs) / pipeline.busiest(run, costs)
                sources[run.origin].append(Timed(rank, run.seconds, stretch))
    found = {}
    for left_out in ("", *sources):
        others = {name: rows for name, rows in sources.items() if name != left_out}
        point = fit(others)
        found[left_out] = {k: float(f"{v:.3g}") for k, v in dataclasses.asdict(point).items()}
        print(left_out or "all", f"{loss(point, others):.4f}", found[left_out], file=sys.stderr)
    print(json.dumps(found, indent=1))
    return 0


def fit(sources: Mapping[str, Sequence[Timed]]) -> Constants:
    """The constants with the least loss that descending one by one finds."""
    point, factor = EXPECTED, 1.2
    best = loss(point, sources)
    while factor > 1.01:
        before = best
        for name in TIMES:
            for step in (factor, 1 / factor):
                while True:
                    tried = dataclasses.replace(point, **{name: getattr(point, name) * step})
                    found = loss(tried, sources)
                    if found >= best - 1e-6:
                        break
                    best, point = found, tried
        if before - best < 1e-4:
            factor **= 0.5
    return point


def loss(constants: Constants, sources: Mapping[str, Sequence[Timed]]) -> float:
    """What a fit makes small."""
    total = weights = 0.0
    for rows in sources.values():
        weight = math.sqrt(len(rows))
        far = sum(min(abs(logarithm(constants, timed)), FAR) for timed in rows)
        total, weights = total + weight * far / len(rows), weights + weight
    pulled = sum(
        abs(math.log(getattr(constants, name) / getattr(EXPECTED, name))) for name in TIMES
    )
    return total / weights + PULL * pulled


def logarithm(constants: Constants, timed: Timed) -> float:
    """log(predicted / published)."""
    rank = dataclasses.replace(timed.rank, constants=constants)
    seconds = timed.stretch * pipeline.busiest(rank.run, rank.costs())
    return math.log((seconds + rank.gradients() + rank.optimizer()) / timed.seconds)


if __name__ == "__main__":
    sys.exit(main())
