"""A case: what is compared, under which conditions; and its row, medians of measured seconds.

ratio         theirs / ours, round by round: both sides of a round had the same machine
ideal         (m + p - 1) / m * (one process on the same micro-batches) / p
efficiency    ideal / measured; of 1F1B without transfers and without a runtime it is 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

COUNTERPARTS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "eager-1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
}
"""Each of autopipe's schedules, and the one of torch.distributed.pipelining it is held against."""

SINGLE = "one process"
"""The side that is no pipeline: rank 0 runs all stages, the others wait."""


@dataclass(frozen=True)
class Case:
    """Conditions of one run of the ranks.

    Attributes:
        ranks, micro_batches: p and m.
        ms: milliseconds of a micro-batch on a rank, forward and backward.
        compute: "sleep" or "matmul".
        rate: operations a second that "matmul" is sized by.
        schedules: autopipe's, each against its counterpart.
        window: receives posted ahead.
        depths: micro-batches in flight besides, per boundary, under eager-1f1b; none: the ranks
            measure a transfer and let autopipe choose.
        rounds: how often each side is timed, one after the other.
        delay_ms, mbit: of the link; both 0: loopback as it is.
        cores: of each rank.
        fifo: ranks run under SCHED_FIFO.
        memory: count bytes instead of seconds.
        relay: where the link's relay listens, if there is one.
    """

    ranks: int
    micro_batches: int
    ms: float
    compute: str
    rate: float
    schedules: tuple[str, ...]
    window: int
    depths: tuple[int, ...]
    rounds: int
    delay_ms: float
    mbit: float
    cores: int
    fifo: bool
    memory: bool
    relay: str | None

    def conditions(self) -> dict[str, Any]:
        """What every row says of itself."""
        known = asdict(self)
        for name in ("schedules", "rate", "relay", "memory"):
            del known[name]
        return known


def row(
    case: Case, schedule: str, times: Mapping[str, Sequence[float]], load: float
) -> dict[str, Any]:
    """One schedule against its counterpart, in seconds.

    Args:
        times: seconds of each round, by side (`ours`, `theirs` and `SINGLE`).
        load: the machine's load average when the rounds were over.
    """
    ours, theirs, single = times[ours_of(schedule)], times[theirs_of(schedule)], times[SINGLE]
    p, m = case.ranks, case.micro_batches
    ideal = [(m + p - 1) / m * one / p for one in single]
    conditions = case.conditions()
    if schedule != "eager-1f1b":
        conditions["depths"] = ()
    return {
        "schedule": schedule,
        "against": COUNTERPARTS[schedule],
        **conditions,
        "ours": _spread(ours),
        "theirs": _spread(theirs),
        "ratio": _spread([b / a for a, b in zip(ours, theirs, strict=True)]),
        "ideal": _spread(ideal),
        "ours_efficiency": _median([i / a for i, a in zip(ideal, ours, strict=True)]),
        "theirs_efficiency": _median([i / b for i, b in zip(ideal, theirs, strict=True)]),
        "load": round(load, 1),
    }


def ours_of(schedule: str) -> str:
    """The name of autopipe's side."""
    return f"autopipe {schedule}"


def theirs_of(schedule: str) -> str:
    """The name of torch's side."""
    return f"torch {COUNTERPARTS[schedule]}"


def _median(values: Sequence[float]) -> float:
    return round(median(values), 5)


def _spread(values: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return [round(value, 5) for value in values] * 3
    return [round(value, 5) for value in quantiles(values, n=4, method="inclusive")]
