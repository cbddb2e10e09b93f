"""Seconds of a step from the seconds of its stages: the formula that every planner is scored by.

Of p stages and m micro-batches let t_s be the seconds of a micro-batch in stage s, and reduce_s
those of summing its gradients. A step takes

    step = sum_s t_s + (m - 1) * max_s t_s + max_s exposed_s

The sum is one micro-batch through all stages and back; each of the others adds one period of the
slowest stage (GPipe, section 2; SC21, section 2.2.1, where all t_s are equal). That is exact for
`gpipe` if B / F is the same in all stages, and an upper bound for `1f1b`, where the warm-up of a
slow stage overlaps with the first micro-batch's way through the stages after it. Stage 0 is the
last to finish its backwards; of the others' sums of gradients that is exposed which the cool-down
does not hide (`planners.model.stage_costs`).

Of any schedule with v stages on each rank

    step = f / v * sum_s t_s + (v * m - f) * max_s t_s + max_s exposed_s

with f the part of a micro-batch's seconds in a rank for which each further rank waits while the
pipeline fills and drains: 1 for 1f1b, gpipe and eager-1f1b, m for naive, 1/3 for zb-h1 with enough
micro-batches. f is counted: it is what makes the formula exact for the schedule's own programs
where stages are alike, F = I = W, and links are free. For `eager-1f1b` at depth e the largest is no
less than (sum_s (F + B) + 2 latencies of every boundary) / (1 + (p - 1) (1 + e)), the law of
`planners.model.eager_period` for the whole pipeline.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import numpy as np

from autopipe.planners.model.places import chunks_of, profile_of
from autopipe.planners.model.problem import EAGER, Config, Problem
from autopipe.planners.model.range_tables import Times
from autopipe.planners.model.stage_costs import StageSeconds
from autopipe.schedules.instructions import Programs, holders
from autopipe.schedules.registry import make
from autopipe.schedules.simulate import even_seconds


def weights(problem: Problem, config: Config) -> tuple[float, float]:
    """The weights of a step's seconds on the sum and on the maximum over a pipeline's stages."""
    asked, m = problem.constraints, config.micro_batches
    chunks = chunks_of(asked, config.schedule, config.chunks)
    if config.pp == 1 and chunks == 1:
        return 1.0, m - 1.0
    if asked.programs:
        filling = filling_of(asked.programs, m)
    elif config.schedule in ("1f1b", "gpipe", EAGER):
        filling = 1.0
    elif config.schedule == "naive":
        filling = float(m)
    else:
        ranks = min(config.pp, MOST_RANKS)
        counted = math.ceil(m * ranks / config.pp)
        if counted >= 3 * ranks:  # from two a rank on it repeats
            counted = 2 * ranks + counted % ranks
        filling = named_filling(config.schedule, ranks, counted, chunks)
    return filling / chunks, chunks * m - filling


MOST_RANKS = 8
"""Ranks of the pipeline that f is counted in; in longer ones it is that of as many micro-batches a
rank."""


@lru_cache(maxsize=1024)
def named_filling(schedule: str, ranks: int, micro_batches: int, chunks: int) -> float:
    """f of a schedule that has a name.

    Where its own law is known it is not counted; B is the whole backward, I and W are its halves.
    ZB-H1 idles (p - 1) (F + I - W) (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section
    2.3), and W more for each micro-batch that there is less than p. ZB-V idles half as long from
    2 p micro-batches on: each of its chunks has half of a rank's layers. An interleaved pipeline
    idles (p - 1) (F + B) / v where p divides m (Narayanan et al., SC 2021, section 2.2.2), and all
    but one of a micro-batch's chunks more for each that there is less than p.
    """
    if ranks == 1:
        return 1.0
    missing = max(0, ranks - micro_batches) / (ranks - 1)
    if schedule == "zb-h1":
        return (1 + missing) / 3
    if schedule == "zb-v" and micro_batches >= 2 * ranks:
        return 1 / 3
    if schedule == "interleaved" and (micro_batches % ranks == 0 or missing):
        return 1 + (chunks - 1) * missing
    return filling_of(make(schedule, ranks, micro_batches, chunks=chunks), micro_batches)


@lru_cache(maxsize=16)
def filling_of(programs: Programs, micro_batches: int) -> float:
    """f of the module's formulas, from the step that equal stages take without transfers."""
    stages, ranks = len(holders(programs)), len(programs)
    if ranks == 1:
        return 1.0
    return (even_seconds(programs) / 3.0 - stages / ranks * micro_batches) / (ranks - 1)


def floor_seconds(problem: Problem, config: Config) -> float:
    """A lower bound on the period of eager-1f1b, whatever the cuts; 0 for other schedules.

    The links are those between the first groups, in rank order, whichever hold the stages.
    """
    if config.schedule != EAGER or config.pp == 1:
        return 0.0
    profile = profile_of(problem, config.dp, config.micro_batches)
    assert profile is not None, "a config has a profile"
    quickest = min(
        math.fsum((*forward, *backward))
        for forward, backward in zip(profile.forward, profile.backward, strict=True)
    )
    links = [problem.machine.link(config.dp, *pair).link for pair in pairwise(range(config.pp))]
    way = quickest + 2 * sum(link.latency for link in links)
    return way / (1 + (config.pp - 1) * (1 + config.depth))


def step_seconds(stages: StageSeconds, weights: tuple[float, float], floor: float = 0.0) -> Times:
    """Seconds of a step from those of its stages along the last axis."""
    slowest = np.maximum(stages.period.max(axis=-1), floor)
    through = weights[0] * stages.whole.sum(axis=-1) + weights[1] * slowest
    return np.asarray(through + stages.exposed.max(axis=-1))
