"""Where a plan's step goes: from computing at the devices' peak down to waiting.

    computing    matmuls at peak, below it, other ops, launches, recompute, exchange, gathering,
                 copying
    waiting      filling, imbalance, transfers, sums

The parts are those of the mean device, and add up to the predicted step. A device counts by its
peak rate, so that the first part is MFU, whatever the devices:

    MFU = flops of the model / (step * peak of all devices) = matmuls at peak / step

Computing is divided by the causes of its stages' seconds (`planfile.work.Spent`); a loss over the
whole batch, which the last rank computes while the others wait, is among the other ops. Waiting is
divided by walking the programs again with fewer things to wait for; each part is the difference:

    even        all stages alike, no transfers or sums    filling   = even - computing
    unhindered  stages as they are                        imbalance = unhindered - even
    unsummed    with transfers                            transfers = unsummed - unhindered
    whole       with sums of gradients: the step          sums      = whole - unsummed
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate, pairwise

from autopipe.planfile import predict, programs, turns
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import StagePrediction
from autopipe.planfile.work import Spent
from autopipe.schedules.instructions import holders
from autopipe.schedules.simulate import Costs, free, simulate

COMPUTED = (
    "matmuls_at_peak",
    "matmuls_below_peak",
    "other_ops",
    "launches",
    "recompute",
    "exchange",
    "gathering",
    "copying",
)
"""What a device computes for; `computing` stands for all of it where a plan does not say."""

WAITED = ("filling", "imbalance", "transfers", "sums")
"""What it does not compute for."""


def mfu(plan: Plan) -> float | None:
    """The share of the devices' peak that the model's own operations take in the predicted step."""
    step, work = plan.prediction.step_seconds, plan.work
    return work.mfu(step) if work is not None and step else None


def tokens_per_second(plan: Plan) -> float | None:
    """Tokens a second of one device; None if rows are no sequences."""
    step, work = plan.prediction.step_seconds, plan.work
    if work is None or not work.tokens or not step:
        return None
    return work.tokens / step / len(plan.mesh.places)


def waterfall(plan: Plan) -> dict[str, float]:
    """Seconds of the predicted step by cause, in order; their sum is the step.

    The names are those of `COMPUTED`, or `computing` alone, and those of `WAITED`.

    Raises:
        ScheduleError: the plan's programs cannot run to their end.
    """
    computed = _computed(plan)
    ends = accumulate([math.fsum(computed.values()), *_ends(plan)], max)  # rounding aside
    return computed | {name: b - a for name, (a, b) in zip(WAITED, pairwise(ends), strict=True)}


def _weights(plan: Plan) -> list[float]:
    """The weight of each stage in the mean device.

    It is the number of micro-batches that the stage runs, times its rank's share of all peaks.
    """
    count = plan.batch.micro_batches
    return [
        turns.rounds(plan.stages, stage, count) * share
        for stage, share in enumerate(_peak_shares(plan))
    ]


def _peak_shares(plan: Plan) -> list[float]:
    """The share of all peaks that the rank of each stage has."""
    peaks = plan.work.peaks if plan.work is not None else (1.0,) * plan.mesh.pp
    return [peaks[rank] / sum(peaks) for rank in holders(programs.compute(plan))]


def _mean(weights: Sequence[float], seconds: Iterable[float]) -> float:
    """Seconds of the mean device in a step, of those that each stage takes for a micro-batch."""
    return math.fsum(weight * own for weight, own in zip(weights, seconds, strict=True))


def _computed(plan: Plan) -> dict[str, float]:
    """The mean device's seconds of computing in a step, by cause."""
    stages, mean = [stage.predicted for stage in plan.stages], partial(_mean, _weights(plan))
    known = [stage.spent for stage in stages if stage.spent is not None]
    both = [stage.forward_seconds + stage.backward_seconds for stage in stages]
    loss = plan.loss_seconds * _peak_shares(plan)[-1]
    if plan.work is None or not all(map(_causes_known, stages)):
        return {"computing": mean(both) + loss}
    parts = {part.name: mean(getattr(own, part.name) for own in known) for part in fields(Spent)}
    parts["other_ops"] += loss
    matmuls = parts.pop("matmuls")
    # A rate that was measured is no bound: some convolution may be faster.
    at_peak = min(plan.work.flops / plan.work.peak, matmuls)
    return {"matmuls_at_peak": at_peak, "matmuls_below_peak": matmuls - at_peak} | parts


def _causes_known(stage: StagePrediction) -> bool:
    """Whether a stage's seconds by cause add up to its seconds: a hand may have changed either."""
    seconds = stage.forward_seconds + stage.backward_seconds
    return stage.spent is not None and math.isclose(stage.spent.seconds, seconds, rel_tol=1e-6)


def _ends(plan: Plan) -> tuple[float, float, float, float]:
    """The seconds of the step in the module's four walks, none faster than the one before it."""
    costs, step, weights = predict.costs(plan), programs.step(plan), _weights(plan)
    stages, count = len(plan.stages), plan.batch.micro_batches
    of_rank = stages // plan.mesh.pp
    forward, backward = (
        [mean / of_rank / turns.rounds(plan.stages, stage, count) for stage in range(stages)]
        for mean in (_mean(weights, costs.forward), _mean(weights, costs.backward))
    )
    none = [0.0] * stages
    walks = (
        Costs.of(forward, backward),
        replace(costs, reduce=none, links=free),
        replace(costs, reduce=none),
        costs,
    )
    even, unhindered, unsummed, whole = (
        simulate(step, cost).seconds + plan.loss_seconds for cost in walks
    )
    # With less to wait for, a step may take longer, if transfers on a wire change their order.
    unsummed = min(unsummed, whole)
    unhindered = min(unhindered, unsummed)
    return min(even, unhindered), unhindered, unsummed, whole
