"""A run's pipeline: its layers by stage, its programs, and the seconds that they take.

A step of many micro-batches is a warm-up, so many periods and an end: it is simulated at four and
at six micro-batches a rank, and each further one takes what those of the two in between do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

from autopipe.schedules import registry
from autopipe.schedules.instructions import Instruction, Kind, Programs, holders
from autopipe.schedules.simulate import COMPUTE, Costs, Timeline, simulate
from benchmarks.published.rows import Run


def layers_of(run: Run) -> tuple[int, ...]:
    """Layers of each stage.

    As many on each, where they divide so. Where they do with two more, embedding and head count
    as a layer each: the first and the last stage have one less. Else the first ones have one more.
    """
    layers, stages = run.model.layers, run.stages
    if (layers + 2) % stages == 0 and layers % stages and stages > 1:
        each = (layers + 2) // stages
        return (each - 1, *(each,) * (stages - 2), each - 1)
    each, more = divmod(layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))


def seconds(run: Run, costs: Costs) -> float:
    """Seconds of all micro-batches, from the costs of one.

    Under zero-bubble schedules it is the longest that a rank takes from its first instruction to
    its last: they let ranks begin the next step without waiting for each other (Qi et al., 2024,
    arXiv:2401.10241, section 4).
    """
    if run.stages == 1:
        return run.micro_batches * (costs.forward[0] + costs.backward[0])
    few, more = 4 * run.pp, 6 * run.pp
    if run.micro_batches <= more:
        return _simulated(run, costs, run.micro_batches)
    # Rounds of interleaved are full, or not, alike.
    few, more = (count + run.micro_batches % run.pp for count in (few, more))
    first, second = (_simulated(run, costs, count) for count in (few, more))
    return second + (second - first) / (more - few) * (run.micro_batches - more)


def busiest(run: Run, costs: Costs) -> float:
    """Seconds for which the busiest rank computes: what is left of `seconds` without its bubble."""
    ranks = holders(programs_of(run.schedule, run.pp, 1, run.chunks))
    each = [0.0] * run.pp
    for rank, forward, backward in zip(ranks, costs.forward, costs.backward, strict=True):
        each[rank] += forward + backward
    return run.micro_batches * max(each)


def _simulated(run: Run, costs: Costs, micro_batches: int) -> float:
    programs = programs_of(run.schedule, run.pp, micro_batches, run.chunks)
    timeline = simulate(programs, costs)
    return longest(timeline) if run.schedule.startswith("zb") else timeline.seconds


def longest(timeline: Timeline) -> float:
    """The most seconds from a rank's first computing to its last."""
    times: dict[int, list[float]] = {}
    for span in timeline.spans:
        if span.instruction.kind in COMPUTE:
            times.setdefault(span.rank, []).extend((span.start, span.end))
    return max(max(found) - min(found) for found in times.values())


@lru_cache(maxsize=256)
def programs_of(schedule: str, ranks: int, micro_batches: int, chunks: int = 1) -> Programs:
    """autopipe's programs, and those of `zb-2p`."""
    if schedule == "zb-2p":
        return zb_2p(ranks, micro_batches)
    return registry.make(schedule, ranks, micro_batches, chunks=chunks)


def zb_2p(ranks: int, micro_batches: int) -> Programs:
    """ZB-H2 of Qi et al., section 2.2: twice the activations of 1F1B, and no bubble inside.

    Two ranks, F = I = W:

        rank 0: F0 F1 F2 I0 W0 F3 I1 W1 ..
        rank 1:    F0 I0 F1 I1 F2 I2 W0 ..

    Rank i of p starts with 2 (p - 1 - i) forwards, runs W 2 i micro-batches behind I, and so holds
    2p - 1 micro-batches.
    """
    programs = []
    for rank in range(ranks):
        f, i, w = (
            iter([Instruction(kind, rank, k) for k in range(micro_batches)])
            for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        )
        programs.append(
            (
                *_turns(2 * (ranks - 1 - rank), f),
                *_turns(2 * rank, f, i),
                *_turns(micro_batches, f, i, w),
            )
        )
    return tuple(programs)


def _turns(times: int, *rows: Iterator[Instruction]) -> Iterator[Instruction]:
    """So many times the next one of each row; a row that has ended is passed over."""
    for _ in range(times):
        for row in rows:
            yield from itertools.islice(row, 1)
