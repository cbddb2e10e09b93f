"""Choose how tensors come to a stage: whole from each tensor-parallel rank, or in parts.

A stage receives R bytes of a micro-batch, and sends gradients of R' of them back. Of those all n
ranks of a group have D and D' whole, in tensors that divide. With b bytes a second between a rank
and its peer, and latency and bandwidth of the group's own link, they take

    whole      (R + R') / b
    in parts   (R - D + D / n + R' - D' + D' / n) / b  +  g(D) + g(D')

    g(x)     = (n - 1) (latency + x / n / bandwidth)               an all-gather on a ring; g(0) = 0

Each stage takes the way that is shorter, unless one is asked for. In parts it keeps both: the part
until its gradient goes back, the whole tensor for what reads it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopipe.cluster.collective_time import Level
from autopipe.planfile.parts import WHOLE
from autopipe.planners.model.places import StagePlace
from autopipe.planners.model.problem import Config, Problem
from autopipe.planners.model.range_tables import Bytes, Tables, Times


def arriving(ranges: Tables, problem: Problem, config: Config, place: StagePlace) -> Tables:
    """The ranges with the bytes received in this place; `parted` is 0 where tensors come whole."""
    asked, n = problem.constraints.transfers, problem.tp
    if not problem.machine.within:
        return ranges
    part, part_gradient = (-(-size // n) for size in (ranges.parted, ranges.parted_gradient))
    less, less_gradient = ranges.parted - part, ranges.parted_gradient - part_gradient
    if place.before is None or asked == WHOLE:
        chosen = np.zeros_like(ranges.parted, bool)
    elif asked is None:
        shorter = (less + less_gradient) / wire_rate(problem, config, place.before)
        chosen = gather_seconds(ranges, problem, place.group.kind) < shorter
    else:
        chosen = ranges.parted > 0
    return replace(
        ranges,
        saved=ranges.saved + np.where(chosen, ranges.parted, 0),
        received=ranges.received - np.where(chosen, less, 0),
        received_gradient=ranges.received_gradient - np.where(chosen, less_gradient, 0),
        parted=np.where(chosen, ranges.parted, 0),
        parted_gradient=np.where(chosen, ranges.parted_gradient, 0),
    )


def transfer_seconds(
    ranges: Tables, problem: Problem, config: Config, before: Level | None
) -> Times:
    """Seconds of a micro-batch and its gradients on the link between two stages."""
    if before is None:
        return np.zeros_like(ranges.earlier)
    moved = ranges.received + ranges.received_gradient
    seconds = moved / wire_rate(problem, config, before)
    return np.asarray(seconds + 2 * before.link.latency * (ranges.received > 0))


def gather_seconds(ranges: Tables, problem: Problem, kind: int) -> Times:
    """Seconds in which a stage's group gathers tensors, and the senders' group their gradients.

    The senders' devices are assumed to be of the stage's own kind. (Gradients that are partial sums
    are reduce-scattered by the stage's own group, which takes as long.)
    """
    if not problem.machine.within:
        return np.zeros_like(ranges.earlier)
    link, others = problem.machine.within[kind], problem.tp - 1

    def gather(size: Bytes) -> Times:
        moved = others / problem.tp * size
        return np.asarray(link.steps(others) * (size > 0) + moved / link.gathers)

    return np.asarray(gather(ranges.parted) + gather(ranges.parted_gradient))


def wire_rate(problem: Problem, config: Config, level: Level) -> float:
    """Bytes a second for each of the devices of a stage."""
    return level.wire(config.dp * problem.machine.streams).bandwidth
