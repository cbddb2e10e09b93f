"""Fit `step.Constants` and the steady rates: `python -m benchmarks.published.fit ROWS.csv`.

Each source in turn is left out: constants are fitted to the others and its error is that of rows
they have not seen. Devices that are never fitted are left out of all. Prints one JSON object per
source on stdout, and one of the fit to all.

The loss is the mean over sources of the mean |log(predicted / published)|, weighted by the square
root of their rows, so that neither one long table nor many short ones decide; a row counts at most
0.4. Each constant is multiplied or divided by a step as long as that helps, in turn, and the step
shrinks. A pipeline's bubble hardly depends on them: its share is simulated once.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import sys
from collections import defaultdict
from typing import NamedTuple

from benchmarks.published import pipeline
from benchmarks.published.__main__ import NEVER_FITTED
from benchmarks.published.machine import Machine, machine_of
from benchmarks.published.rows import Run, Unsupported, read
from benchmarks.published.scores import quantile
from benchmarks.published.step import FITTED, Constants, Rank

Point = dict[str, float]
"""`Constants` by name, and the share of their rate that devices hold: `rate`, `rate_newer`."""

START: Point = {**dataclasses.asdict(FITTED), "rate": 1.0, "rate_newer": 1.0}
"""Rates are relative to those of `autopipe.presets`."""


class Timed(NamedTuple):
    """A run, its machine, its published seconds and how much longer its bubble makes it."""

    run: Run
    machine: Machine
    seconds: float
    stretch: float


def main() -> int:
    """Print the errors of every source, fitted without it."""
    sources: dict[str, list[Timed]] = defaultdict(list)
    with open(sys.argv[1], newline="") as file:
        for row in csv.DictReader(file):
            try:
                run = read(row)
                machine = machine_of(run)
            except Unsupported:
                continue
            if run.seconds and NEVER_FITTED not in run.gpu:
                costs = Rank(run, machine, FITTED).costs()
                stretch = pipeline.seconds(run, costs) / pipeline.busiest(run, costs)
                name = run.table.split("_table")[0]
                sources[name].append(Timed(run, machine, run.seconds, stretch))
    for name, rows in sources.items():
        point = fit({other: found for other, found in sources.items() if other != name})
        errors = [abs(math.expm1(logarithm(point, timed))) for timed in rows]
        _print(name, len(rows), quantile(errors, 0.5), quantile(errors, 0.9), point)
    point = fit(sources)
    every = [abs(math.expm1(logarithm(point, t))) for rows in sources.values() for t in rows]
    _print("none left out", len(every), quantile(every, 0.5), quantile(every, 0.9), point)
    return 0


def fit(sources: dict[str, list[Timed]], rounds: int = 4) -> Point:
    """The constants with the least loss that descending one by one finds."""
    best, point = loss(START, sources), dict(START)
    step = 1.15
    for _ in range(rounds):
        for name in point:
            for factor in (step, 1 / step):
                while True:
                    tried = {**point, name: point[name] * factor}
                    found = loss(tried, sources)
                    if found >= best - 1e-6:
                        break
                    best, point = found, tried
        step = step**0.5
    return point


def loss(point: Point, sources: dict[str, list[Timed]]) -> float:
    """What a fit makes small."""
    total = weights = 0.0
    for rows in sources.values():
        weight = math.sqrt(len(rows))
        mean = sum(min(abs(logarithm(point, timed)), 0.4) for timed in rows) / len(rows)
        total, weights = total + weight * mean, weights + weight
    return total / weights


def logarithm(point: Point, timed: Timed) -> float:
    """log(predicted / published)."""
    held = dict(point)
    older, newer = held.pop("rate"), held.pop("rate_newer")
    share = newer if timed.machine.newer else older
    device = timed.machine.device
    flops = {dtype: rate * share for dtype, rate in device.flops.items()}
    machine = dataclasses.replace(timed.machine, device=dataclasses.replace(device, flops=flops))
    rank = Rank(timed.run, machine, Constants(**held))
    seconds = timed.stretch * pipeline.busiest(timed.run, rank.costs())
    return math.log((seconds + rank.gradients() + rank.optimizer()) / timed.seconds)


def _print(name: str, rows: int, median: float, p90: float, point: Point) -> None:
    line = {"left_out": name, "rows": rows, "median_error": median, "p90_error": p90, **point}
    print(
        json.dumps({k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in line.items()})
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
