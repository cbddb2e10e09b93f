"""Fit the constants: `python -m benchmarks.published.fit ROWS.csv > fitted.json`.

Each source in turn is left out and the constants are fitted to the others; then to all. Devices
that are never fitted are left out of all.

    loss = mean over sources, weighted by sqrt(rows), of mean min(|log(predicted / published)|, 0.4)
         + 0.003 * sum over constants of |log(value / expected)|

so that neither one long table nor many short ones decide, a row that is far off counts as much as
any other such row, and a constant of which the sources say nothing stays what is expected. Each
constant of time is multiplied or divided by a factor as long as that helps, in turn, and the factor
shrinks. A pipeline's bubble hardly depends on them: its share is simulated once. The two constants
of memory are the best of a grid; a source that says which runs ran out of memory counts by the
share of its runs of either kind that are told wrong.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from autopipe.errors import AutopipeError
from benchmarks.published import memory, pipeline
from benchmarks.published.constants import EXPECTED, Constants
from benchmarks.published.machine import NEVER_FITTED, machine_of
from benchmarks.published.rows import Row, Unsupported, read
from benchmarks.published.scores import balanced_accuracy
from benchmarks.published.step import Rank
from benchmarks.published.transformer import parts_of

FAR, PULL = 0.4, 0.003
"""What a row counts at most, and what a constant costs that is e times what is expected."""

GRID = {"fragmented": [0.02 * n for n in range(11)], "context": [0.5 * n for n in range(1, 9)]}
"""What is tried for the constants of memory."""

TIMES = tuple(field.name for field in dataclasses.fields(Constants) if field.name not in GRID)
"""The constants of time."""


class Known(NamedTuple):
    """A rank, how much longer its pipeline's bubble makes its step, and its bytes of tensors."""

    rank: Rank
    stretch: float
    allocated: float


Sources = Mapping[str, Sequence[Known]]


def main() -> int:
    """Print the constants by the source that is left out."""
    with open(sys.argv[1], newline="") as file:
        sources = known(csv.DictReader(file))
    found = {}
    for left_out in ("", *sources):
        point = fit({name: rows for name, rows in sources.items() if name != left_out})
        found[left_out] = {k: float(f"{v:.3g}") for k, v in dataclasses.asdict(point).items()}
        print(left_out or "none left out", found[left_out], file=sys.stderr)
    print(json.dumps(found, indent=1))
    return 0


def known(rows: Iterable[Row]) -> Sources:
    """The rows that can be predicted and fitted to, by source."""
    found: dict[str, list[Known]] = defaultdict(list)
    for row in rows:
        try:
            run = read(row)
            rank = Rank(run, machine_of(run), parts_of(run), EXPECTED)
            costs = rank.costs()
        except (Unsupported, AutopipeError):
            continue
        if NEVER_FITTED not in run.gpu:
            stretch = 1.0
            if run.seconds:
                stretch = pipeline.seconds(run, costs) / pipeline.busiest(run, costs)
            found[run.origin].append(Known(rank, stretch, memory.allocated(run)))
    return found


def fit(sources: Sources) -> Constants:
    """The constants with the least loss."""
    times = {n: [k for k in rows if k.rank.run.seconds] for n, rows in sources.items()}
    best = descend({name: rows for name, rows in times.items() if rows})
    tried = [
        dataclasses.replace(best, **dict(zip(GRID, values, strict=True)))
        for values in itertools.product(*GRID.values())
    ]
    return min(tried, key=lambda constants: memory_loss(constants, sources))


def descend(sources: Sources) -> Constants:
    """The constants of time with the least loss that descending one by one finds."""
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


def loss(constants: Constants, sources: Sources) -> float:
    """What a fit of time makes small."""
    total = weights = 0.0
    for rows in sources.values():
        weight = math.sqrt(len(rows))
        far = sum(min(abs(logarithm(constants, known)), FAR) for known in rows)
        total, weights = total + weight * far / len(rows), weights + weight
    return total / weights + PULL * _pulled(constants, TIMES)


def _pulled(constants: Constants, names: Iterable[str]) -> float:
    """How far constants are from what is expected, all together."""
    pairs = [(getattr(constants, name), getattr(EXPECTED, name)) for name in names]
    return sum(abs(math.log(value / expected)) for value, expected in pairs)


def logarithm(constants: Constants, known: Known) -> float:
    """log(predicted / published) of a step's seconds."""
    rank = dataclasses.replace(known.rank, constants=constants)
    seconds = known.stretch * pipeline.busiest(rank.run, rank.costs())
    assert rank.run.seconds
    return math.log((seconds + rank.gradients() + rank.optimizer()) / rank.run.seconds)


def memory_loss(constants: Constants, sources: Sources) -> float:
    """What a fit of memory makes small."""
    total = weights = 0.0
    for rows in sources.values():
        wrong = [_memory_logarithm(constants, k) for k in rows if k.rank.run.memory]
        told = balanced_accuracy(
            [
                (
                    k.rank.run.oom,
                    memory.needed(k.allocated, "device", constants) > k.rank.machine.capacity,
                )
                for k in rows
            ]
        )
        for count, off in (
            (len(wrong), sum(wrong) / max(1, len(wrong))),
            (len(rows) if told is not None else 0, 1 - (told or 0)),
        ):
            total, weights = total + math.sqrt(count) * off, weights + math.sqrt(count)
    return total / max(weights, 1.0) + PULL * abs(constants.context - EXPECTED.context)


def _memory_logarithm(constants: Constants, known: Known) -> float:
    run = known.rank.run
    assert run.memory
    predicted = memory.needed(known.allocated, run.memory_kind, constants)
    return min(abs(math.log(predicted / run.memory)), FAR)


if __name__ == "__main__":
    sys.exit(main())
