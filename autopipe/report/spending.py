"""Say where a plan's step goes, as sentences and as bars from the devices' peak down to waiting.

matmuls at peak     ████████████████                       1.42 s   37.6 %
matmuls below peak                  ██████████████         1.31 s   34.7 %
other ops                                         ███████  690 ms   18.3 %
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autopipe.planfile.contents import Plan
from autopipe.planfile.waterfall import mfu, tokens_per_second, waterfall
from autopipe.report import paper
from autopipe.util import numbers

WORDS = {
    "computing": "computing",
    "matmuls_at_peak": "matmuls at peak",
    "matmuls_below_peak": "matmuls below peak",
    "other_ops": "other ops",
    "launches": "launches of ops",
    "recompute": "recomputation",
    "exchange": "tp collectives",
    "gathering": "ZeRO-3 gathering",
    "copying": "copies to the host",
    "filling": "warm-up, cool-down",
    "imbalance": "unequal stages",
    "transfers": "transfers",
    "sums": "gradient sums",
}
"""The parts of `planfile.waterfall` in words."""

_OF_ZERO = {
    ("sums", 1): "ZeRO-1 exchange",
    ("sums", 2): "ZeRO-2 gathering",
    ("gathering", 2): "ZeRO-2 scattering",
}
"""The words of parts by the plan's ZeRO stage, where it has others."""

TITLE = "where a step goes, on the mean device (the optimizer's own is not counted)"

LEAST = 0.01
"""The share of a step below which a part has no bar of its own."""


class Bar(NamedTuple):
    """A part of the step: its words, its seconds, and those of the parts before it."""

    name: str
    seconds: float
    before: float


def bars(plan: Plan, parts: Mapping[str, float] | None = None) -> list[Bar]:
    """The parts of a step that take a visible share of it, and what the others take together.

    Args:
        parts: the plan's `waterfall`, where it is at hand.
    """
    parts = parts or waterfall(plan)
    step, found, small = sum(parts.values()), list[Bar](), 0.0
    before = 0.0
    for name, seconds in parts.items():
        if seconds < LEAST * step:
            small += seconds
            continue
        words = _OF_ZERO.get((name, plan.zero), WORDS[name])
        found.append(Bar(words, seconds, before))
        before += seconds
    if small > numbers.VISIBLE * step:
        found.append(Bar("all else", small, before))
    return found


def shares(found: Sequence[Bar]) -> list[str]:
    """The share of each in the step, as `37.6 %`; they add up to 100.0 %."""
    step = sum(bar.seconds for bar in found)
    if not step:
        return [""] * len(found)
    printed = numbers.adding_up([100 * bar.seconds / step for bar in found], 1)
    return [f"{share} %" for share in printed]


def picture(plan: Plan, columns: int) -> Iterator[str]:
    """A line of at most `columns` columns for each part of a step; none if it takes no time."""
    found = bars(plan)
    step = sum(bar.seconds for bar in found)
    if not step:
        return
    yield paper.paragraph(TITLE + ":", columns)
    times = [numbers.seconds(bar.seconds) for bar in found]
    margin, end = max(len(bar.name) for bar in found) + 2, max(map(len, times)) + 2
    room = columns - margin - end - len("  100.0 %")
    for bar, time, share in zip(found, times, shares(found), strict=True):
        first, last = (round(at / step * room) for at in (bar.before, bar.before + bar.seconds))
        drawn = " " * min(first, room - 1) + "█" * max(1, last - first)
        yield f"{bar.name:<{margin}}{drawn:<{room}}{time:>{end}}{share:>9}"


def speed(plan: Plan) -> str:
    """`8,661 tokens/s/GPU; MFU 37.5 % of 989 TFLOP/s (bf16); 32.1 GPU hours a billion tokens`."""
    step, devices = plan.prediction.step_seconds, len(plan.mesh.places)
    shared = not plan.cluster.all_gpus
    one = "process" if shared else "GPU"
    tokens, reached, work = tokens_per_second(plan), mfu(plan), plan.work
    parts = []
    if tokens is not None:
        parts.append(f"{numbers.rate(tokens)} tokens/s/{one}")
    elif step:
        parts.append(f"{numbers.rate(plan.batch.rows / step / devices)} rows/s/{one}")
    if reached is not None and work is not None:
        peak, own = (numbers.flops(rate / devices) for rate in (work.peak, work.flops / step))
        source = "measured" if work.measured else "datasheet"
        parts.append(
            f"{own}/{one}, an MFU of {100 * reached:.1f} % ({work.dtype} {source}: {peak})"
        )
    if tokens is not None and not shared:
        parts.append(f"{numbers.rate(1e9 / tokens / 3600)} GPU hours a billion tokens")
    return "; ".join(parts)
