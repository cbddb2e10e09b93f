"""How far off predictions are: errors by source, order within sweeps, memory, out of memory."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from autopipe.cluster import efficiency
from benchmarks.published import deepspeed
from benchmarks.published.rows import Run

LARGE, WIDE = 8, 1.5
"""A sweep is scored by its rank correlation if it has at least `LARGE` rows and the slowest takes
`WIDE` times as long as the fastest; else by its best row."""

ORDERED, NEAR = 0.9, 0.05
"""The least rank correlation, and how much longer the predicted best may take than the best."""


@dataclass(frozen=True)
class Prediction:
    """What is predicted for a run.

    Args:
        seconds: of a step.
        memory: bytes as the run's source counts them.
        needed, capacity: bytes of tensors on the fullest device, and those that it has room for.
        bytes: `needed` by what they are for.
    """

    run: Run
    seconds: float
    memory: float
    needed: float
    capacity: float
    bytes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run, line: Mapping[str, Any]) -> Prediction:
        """The prediction of a row as it was printed."""
        capacity, parts = line["capacity_bytes"], line["bytes"]
        needed, reserved = deepspeed.held(run, line["needed_bytes"], parts)
        tensors = needed if run.memory_kind == "allocated" else reserved
        memory = counted(tensors, run.memory_kind)
        return cls(run, line["predicted_step_s"], memory, needed, capacity, parts)

    @property
    def oom(self) -> bool:
        """The device would run out of memory."""
        return self.needed > self.capacity

    @property
    def error(self) -> float | None:
        """(predicted - published) / published of the step; None if none was published."""
        return self.seconds / self.run.seconds - 1 if self.run.seconds else None

    @property
    def memory_error(self) -> float | None:
        """The same of memory."""
        return self.memory / self.run.memory - 1 if self.run.memory else None


def counted(allocated: float, kind: str) -> float:
    """Bytes of tensors as a source counts them, by the margins that the tool itself leaves.

    reserved   what the caching allocator has: its fragments too
    device     what nvidia-smi shows: the context and libraries too
    """
    if kind == "allocated":
        return allocated
    reserved = allocated * (1 + efficiency.FRAGMENTED)
    return reserved if kind == "reserved" else reserved + efficiency.RESERVE


def summary(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Counts, and quantiles of errors; what cannot be said is left out."""
    found: dict[str, Any] = {"rows": len(predictions)}
    found |= _spread("step", [p.error for p in predictions])
    found |= _spread("memory", [p.memory_error for p in predictions])
    for name, of, wrong in (("ran", False, "ran_misfit"), ("oom", True, "oom_fit")):
        rows = [p for p in predictions if p.run.oom is of]
        if rows:
            found |= {name: len(rows), wrong: sum(p.oom is not of for p in rows)}
    return found


def _spread(name: str, errors: Iterable[float | None]) -> dict[str, Any]:
    known = [error for error in errors if error is not None]
    if not known:
        return {}
    return {
        f"{name}_rows": len(known),
        f"{name}_median_error": quantile([abs(error) for error in known], 0.5),
        f"{name}_p90_error": quantile([abs(error) for error in known], 0.9),
        f"{name}_bias": statistics.median(known),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, between two of them by straight line."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks, equal values having the mean of their ranks; 0 where
    all values are equal."""
    first, second = _ranks(one), _ranks(other)
    if len(set(first)) == 1 or len(set(second)) == 1:
        return 0.0
    return statistics.correlation(first, second)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def sweeps(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """The sweeps of three timed rows or more.

    `best` is the published time of the layout predicted best, over that of the true best, less 1.
    It is the worst of the groups of rows that could stand for each other: of as many sequences of
    one length on as many devices.
    """
    found = []
    for (table, source, model), rows in _grouped(predictions, lambda p: p.run.sweep):
        published = [p.run.seconds for p in rows if p.run.seconds]
        predicted = [p.seconds for p in rows if p.run.seconds]
        if len(published) < 3:
            continue
        spread = max(published) / min(published)
        ordered = len(published) >= LARGE and spread >= WIDE
        correlation = rank_correlation(published, predicted)
        best = max(
            _best(group)
            for _, group in _grouped(rows, lambda p: (p.run.batch, p.run.model.seq, p.run.devices))
        )
        found.append(
            {
                "table": table,
                "source": source,
                "model": model,
                "rows": len(published),
                "slowest_over_fastest": spread,
                "held_to": "order" if ordered else "best",
                "rank_correlation": correlation,
                "best": best,
                "held": correlation >= ORDERED if ordered else best <= NEAR,
            }
        )
    return found


def _best(predictions: Sequence[Prediction]) -> float:
    timed = [(p.seconds, p.run.seconds) for p in predictions if p.run.seconds]
    if not timed:
        return 0.0
    return min(timed)[1] / min(published for _, published in timed) - 1


_Key = TypeVar("_Key", bound=Hashable)


def _grouped(
    predictions: Iterable[Prediction], key: Callable[[Prediction], _Key]
) -> list[tuple[_Key, list[Prediction]]]:
    groups: dict[_Key, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        groups[key(prediction)].append(prediction)
    return list(groups.items())
