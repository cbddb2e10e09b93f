"""Estimate what a decision costs: seconds of a step and bytes of each stage, for every planner.

The estimate is for searching. The figures in a plan are others: its programs are walked and its
step is simulated (`planners.driver.write_plan`, `planfile.predict`). The formula of a step is in
`planners.model.step_formula`, those of one stage in `planners.model.stage_costs` and
`planners.model.memory`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopipe.errors import InfeasibleError
from autopipe.planfile.parts import Memory
from autopipe.planners.model import memory
from autopipe.planners.model.block_parts import compositions, figures
from autopipe.planners.model.keeping_less import costs, sets_of
from autopipe.planners.model.places import (
    StagePlace,
    places,
    profile_of,
    ranks_of,
    stages_of,
)
from autopipe.planners.model.problem import WHOLE, Config, Decision, Problem
from autopipe.planners.model.range_tables import tables
from autopipe.planners.model.recompute_sets import KeptLess, chosen
from autopipe.planners.model.stage_costs import StageSeconds, stage_work
from autopipe.planners.model.step_formula import floor_seconds, step_seconds, weights
from autopipe.planners.model.transfers import arriving


@dataclass(frozen=True)
class StageEstimate:
    """What one stage costs: seconds of a micro-batch, and bytes on each of its devices.

    Attributes:
        first: its first unit.
        last: its last unit, which it includes.
        forward_seconds: of a micro-batch's forward, with what it waits for gathering and copies.
        backward_seconds: the same of its backward, with blocks that run again.
        transfer_seconds: of a micro-batch's transfers from the stage before, and of gathering the
            tensors that come in parts.
        period: seconds that each further micro-batch adds: all of a micro-batch's or, if transfers
            are hidden, those of computing or of the wire.
        in_flight: micro-batches whose activations the stage holds at once.
        memory: bytes by purpose.
        spent: a micro-batch's seconds by cause, transfers and gathering included.
        kind: the number of its devices' kind.
        in_parts: whether tensors that can be divided come to it in parts.
    """

    first: int
    last: int
    forward_seconds: float
    backward_seconds: float
    transfer_seconds: float
    period: float
    in_flight: int
    memory: Memory
    spent: Mapping[str, float]
    kind: int
    in_parts: bool = False


COMPUTING, AGAIN = "computing", "running blocks again"
EXCHANGES, GATHERING = "tensor-parallel exchanges", "gathering and scattering"
COPYING, TRANSFERS = "copies to the host and back", "transfers"
"""What a stage's seconds of a micro-batch are for."""

REDUCING, BUBBLE = "reducing gradients", "the bubble"
"""What else a step's seconds are for. A plan says by which of all these another mesh is slower."""


@dataclass(frozen=True)
class Estimate:
    """What a decision costs.

    Args:
        stages: one per stage.
        step_seconds: seconds of the whole step.
        spent: a device's seconds of a step by cause, on average.
        beyond: for each pipeline rank the bytes that it needs beyond its devices' limit; negative
            if it leaves some free. Of ranks that take turns only the first is listed.
        worst: the stages of the rank with the largest `beyond`.
        limit: the limit of that rank's devices, in bytes.
    """

    stages: tuple[StageEstimate, ...]
    step_seconds: float
    spent: Mapping[str, float]
    beyond: tuple[int, ...]
    worst: tuple[int, ...]
    limit: int

    @property
    def fits(self) -> bool:
        """No device needs more than it may hold."""
        return max(self.beyond) <= 0

    @property
    def overflow(self) -> int:
        """Bytes that the worst rank needs beyond its limit; 0 if it fits."""
        return max(0, *self.beyond)

    @property
    def spare(self) -> int:
        """Bytes that the device nearest to its limit has left, where all fit."""
        return -max(self.beyond)


PipelineDegrees = tuple[int, int]
"""Of a config: pipeline ranks, replicas."""


class Scored(NamedTuple):
    """A decision and what it costs."""

    decision: Decision
    estimate: Estimate

    @property
    def mesh(self) -> PipelineDegrees:
        """The number of pipeline ranks, and that of replicas."""
        return self.decision.config[:2]


def estimate(problem: Problem, decision: Decision) -> Estimate:
    """Score a decision.

    Raises:
        InfeasibleError: the batch does not divide into the decision's micro-batches, no profile
            has their rows, or the cuts are no ascending units between 1 and units - 1.
    """
    config = decision.config
    _check(problem, decision)
    bounds = (0, *decision.cuts, problem.units)
    groups = decision.groups or tuple(range(config.pp))
    stage_places = places(problem, config, groups)
    recomputed = decision.recompute or ((),) * decision.stages
    offload = decision.offload or ((),) * decision.stages
    stages = [
        _stage(problem, config, place, bounds[s : s + 2], KeptLess(recomputed[s], offload[s]))
        for s, place in enumerate(stage_places)
    ]
    seconds = StageSeconds(*map(np.array, zip(*(stage.seconds for stage in stages), strict=True)))
    step = step_seconds(seconds, weights(problem, config), floor_seconds(problem, config))
    ranks = ranks_of(problem, config)
    held = dict.fromkeys(sorted(ranks), 0)
    for stage, rank in zip(stages, ranks, strict=True):
        held[rank] += stage.estimate.memory.peak
    limits = {rank: stage_places[ranks.index(rank)].group.memory for rank in held}
    beyond = {rank: memory.excess(held[rank], limits[rank]) for rank in held}
    worst = max(beyond, key=lambda rank: beyond[rank])
    spent: dict[str, float] = defaultdict(float)
    for stage in stages:
        for cause, amount in stage.estimate.spent.items():
            spent[cause] += amount * config.micro_batches / config.pp
    spent[REDUCING] = float(seconds.exposed.max())
    spent[BUBBLE] = max(0.0, float(step) - math.fsum(spent.values()))
    return Estimate(
        stages=tuple(stage.estimate for stage in stages),
        step_seconds=float(step),
        spent=spent,
        beyond=tuple(beyond.values()),
        worst=tuple(s for s, rank in enumerate(ranks) if rank == worst),
        limit=limits[worst],
    )


def settle(
    problem: Problem, config: Config, cuts: tuple[int, ...], groups: tuple[int, ...]
) -> Decision:
    """The decision with these cuts and groups of devices; blocks run again as far as they must."""
    profile = profile_of(problem, config.dp, config.micro_batches)
    assert profile is not None, "a config has a profile"
    ranges, numbers = tables(problem, profile), compositions(problem).number
    kept_less = []
    bounds = (0, *cuts, problem.units)
    for place, first, last in zip(
        places(problem, config, groups), bounds, bounds[1:], strict=False
    ):
        number = numbers[first, last]
        cheapest = costs(problem, config, place, ranges.at(first, last), number)
        sets = sets_of(problem, config, place)
        kept_less.append(chosen(problem, first, last, sets, int(cheapest.recomputed)))
    return Decision(
        config, cuts, tuple(k.again for k in kept_less), groups, tuple(k.offload for k in kept_less)
    )


class _ScoredStage(NamedTuple):
    estimate: StageEstimate
    seconds: StageSeconds


def _stage(
    problem: Problem,
    config: Config,
    place: StagePlace,
    bounds: tuple[int, ...],
    blocks: KeptLess,
) -> _ScoredStage:
    """The estimate of one stage [first, last), of which these blocks keep less."""
    first, last = bounds
    profile = problem.profile(config.microbatch_rows(problem.batch))
    ranges = arriving(tables(problem, profile).at(first, last), problem, config, place)
    kind = place.group.kind

    def saved(block: int, level: int = WHOLE) -> tuple[int, float]:
        start, stop = problem.recomputable[block]
        part = max(first - start, 0), min(last, stop) - start
        return figures(problem, profile.rows, kind, block, part, level)

    again = [saved(*each) for each in blocks.again]
    dropped, extra = sum(size for size, _ in again), sum(seconds for _, seconds in again)
    away = sorted(saved(block)[0] for block in blocks.offload)
    held = 0
    if dropped:
        sets = sets_of(problem, config, place)
        held = int(sets.largest[compositions(problem).number[first, last]])
    offloaded, moving = sum(away), sum(away[-2:])
    kept_less = dropped + offloaded, held, moving
    shared, waiting = place.shared(config), place.waiting
    parts = memory.estimate(ranges, problem, shared, place.in_flight, *kept_less, waiting=waiting)
    work = stage_work(problem, config, place, ranges)
    seconds = work.seconds(extra, offloaded)
    waits = [float(wait) for wait in work.gathering(extra)]
    copies = [float(wait) for wait in work.copying(extra, offloaded)]
    transfers = float(work.between + work.within)
    forward, backward = float(ranges.forward[kind]), float(ranges.backward[kind])
    exchange = float(ranges.exchange[kind]) if ranges.exchange else 0.0
    estimated = StageEstimate(
        first=first,
        last=last - 1,
        forward_seconds=forward + waits[0] + copies[0],
        backward_seconds=backward + waits[1] + copies[1] + extra,
        transfer_seconds=transfers,
        period=float(seconds.period),
        in_flight=place.in_flight,
        memory=Memory(**{purpose: int(held) for purpose, held in parts._asdict().items()}),
        spent={
            COMPUTING: forward + backward - exchange,
            AGAIN: extra,
            EXCHANGES: exchange,
            GATHERING: sum(waits),
            COPYING: sum(copies),
            TRANSFERS: transfers,
        },
        kind=kind,
        in_parts=bool(ranges.parted > 0),
    )
    return _ScoredStage(estimated, seconds)


def _check(problem: Problem, decision: Decision) -> None:
    config = decision.config
    bounds = (0, *decision.cuts, problem.units)
    ascending = all(first < end for first, end in zip(bounds, bounds[1:], strict=False))
    stages = stages_of(problem, config)
    if decision.stages != stages or not ascending:
        raise InfeasibleError(
            f"pp={config.pp} needs {stages - 1} ascending cuts between 1 and "
            f"{problem.units - 1}, found {decision.cuts}"
        )
    if profile_of(problem, config.dp, config.micro_batches) is None:
        rows = ", ".join(str(profile.rows) for profile in problem.profiles)
        raise InfeasibleError(
            f"a batch of {problem.batch} rows over dp={config.dp} and "
            f"micro_batches={config.micro_batches} does not give micro-batches of a size that "
            f"was profiled ({rows} rows)"
        )
