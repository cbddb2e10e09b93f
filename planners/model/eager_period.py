"""The law of eager 1F1B: the period that depths and windows give, and the bytes they take.

With a one-way cost c, a stage of 1F1B gets its next micro-batch only when one has gone to the next
stage and come back. More micro-batches in flight hide that. Let stage i take f_i = F_i + B_i for a
micro-batch, boundary j|j+1 take c_j = latency + bytes / bandwidth one way and x_j = bytes /
bandwidth of the wire, and let e_j be its depth, w_j its window. Stage i holds

    d_i = min(m, p - i + sum of e_j over j >= i)

micro-batches. In the steady state these follow each other at the period of the slowest cycle of the
graph of waits. The period of a cycle is its seconds over the micro-batches on it:

    f_i / 1                                                     a stage computes
    x_j / 1                                                     a wire carries
    (2 latency_j + x_j) / w_j                                   notice of a receive, then the tensor
    sum of f_i (a <= i <= b) + sum of 2 c_j (a <= j < b)        from stage a to b and back
    ----------------------------------------------------
              1 + sum of (1 + e_j) (a <= j < b)

Where all stages and boundaries are alike the last is largest for the whole pipeline,

    (p (F + B) + 2 (p - 1) c) / ((p - 1) (1 + e) + 1)           for two stages 2 (F+B+c) / (e+2)

so that a boundary is hidden from e = 2c / (F + B) on, and no depth helps against a wire that is
slower than the computation. Measured over 5 ms one way (c = 8.5 ms with 256 KiB), F + B = 10 ms,
two stages, 16 micro-batches: 309, 224 and 211 ms a step with e = 0, 1 and 2.

There are no other cycles: simulated steps grow by exactly this for each micro-batch. But a step
also fills and drains, so `planners.costs.eager_depths` simulates what the law proposes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.errors import ScheduleError
from autopipe.schedules.instructions import Channel, Flow
from autopipe.schedules.simulate import LinkTime


@dataclass(frozen=True)
class StageLink:
    """The link between stages j and j + 1, and the tensors on it.

    Args:
        latency: seconds one way.
        bandwidth: bytes a second, one direction.
        activation, gradient: bytes of one micro-batch there and back.
        posted: bytes that one more receive posted ahead takes on each of the two stages.
    """

    latency: float
    bandwidth: float
    activation: float
    gradient: float
    posted: int


@dataclass(frozen=True)
class EagerPipeline:
    """The pipeline for which windows and depths are chosen; each stage has a rank of its own.

    Args:
        forward, backward: seconds of one micro-batch in each stage.
        boundaries: one fewer than stages.
        micro_batches: of one step.
        held: bytes that one more micro-batch in flight takes in each stage.
        room: bytes that each stage has left with depths of 0 and windows of 1.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    boundaries: Sequence[StageLink]
    micro_batches: int
    held: Sequence[int]
    room: Sequence[int]

    def link(self, channel: Channel) -> LinkTime:
        """The link of a channel between neighbours."""
        boundary = self.boundaries[min(channel.source, channel.target)]
        there = channel.flow is Flow.ACTIVATION
        size = boundary.activation if there else boundary.gradient
        return LinkTime(boundary.latency, boundary.bandwidth, size)


def check(pipeline: EagerPipeline) -> None:
    """Refuse numbers that no pipeline can have."""
    stages = len(pipeline.forward)
    for name, found, expected in (
        ("backward", pipeline.backward, stages),
        ("boundaries", pipeline.boundaries, stages - 1),
        ("held", pipeline.held, stages),
        ("room", pipeline.room, stages),
    ):
        if len(found) != expected:
            raise ScheduleError(
                f"expected {expected} {name} of {stages} stages, found {len(found)}"
            )
    if stages < 1 or pipeline.micro_batches < 1:
        raise ScheduleError(
            f"expected at least 1 stage and 1 micro-batch, found {stages} and "
            f"{pipeline.micro_batches}"
        )


def flights(pipeline: EagerPipeline, depths: Sequence[int]) -> tuple[int, ...]:
    """The most micro-batches that each stage holds at once."""
    stages = len(pipeline.forward)
    return tuple(
        min(pipeline.micro_batches, stages - stage + sum(depths[stage:])) for stage in range(stages)
    )


def extra_bytes(
    pipeline: EagerPipeline, depths: Sequence[int], windows: Sequence[int]
) -> tuple[int, ...]:
    """Bytes of each stage beyond depths of 0 and windows of 1."""
    least = flights(pipeline, [0] * len(depths))
    flying = flights(pipeline, depths)
    found = [size * (n - n0) for size, n, n0 in zip(pipeline.held, flying, least, strict=True)]
    for j, (boundary, window) in enumerate(zip(pipeline.boundaries, windows, strict=True)):
        for stage in (j, j + 1):
            found[stage] += boundary.posted * (min(window, pipeline.micro_batches) - 1)
    return tuple(found)


def bound(pipeline: EagerPipeline) -> float:
    """A lower bound on a step's seconds, for any depths and windows.

    One micro-batch goes to a stage, or over a wire and to the stage behind it, and back to stage 0;
    the others pass that stage or wire one after the other.
    """
    rest = pipeline.micro_batches - 1
    seconds = way = 0.0  # there and back, through the stages so far
    for stage, computing in enumerate(np.add(pipeline.forward, pipeline.backward).tolist()):
        slowest = computing
        if stage > 0:
            there, back = (pipeline.link(channel) for channel in _channels(stage - 1))
            way += there.latency + there.carrying + back.latency + back.carrying
            slowest = max(computing, there.carrying, back.carrying)
        way += computing
        seconds = max(seconds, way + rest * slowest)
    return seconds


def _channels(boundary: int) -> tuple[Channel, Channel]:
    """The two channels between two stages: activations, and their gradients back."""
    return (
        Channel(boundary, boundary + 1, Flow.ACTIVATION),
        Channel(boundary + 1, boundary, Flow.GRADIENT),
    )


@dataclass(frozen=True, eq=False)
class Law:
    """The cycles of the graph of waits whose periods depths and windows shorten.

    Args:
        floor: the period of computation and wires alone.
        seconds: [a, b], from stage a to stage b and back.
        notices: [j], a notice there and a tensor back over boundary j, of the slower direction.
    """

    floor: float
    seconds: NDArray[np.float64]
    notices: NDArray[np.float64]

    @staticmethod
    def of(pipeline: EagerPipeline) -> Law:
        pairs = [[pipeline.link(c) for c in _channels(j)] for j in range(len(pipeline.boundaries))]
        compute = np.add(pipeline.forward, pipeline.backward)
        carrying = [max(link.carrying for link in pair) for pair in pairs]
        both = [sum(link.latency + link.carrying for link in pair) for pair in pairs]
        before = np.concatenate(([0.0], np.cumsum(compute)))
        crossed = np.concatenate(([0.0], np.cumsum(both)))
        return Law(
            floor=float(max([*compute, *carrying])),
            seconds=np.triu(
                before[None, 1:] - before[:-1, None] + crossed[None, :] - crossed[:, None], 1
            ),
            notices=np.array([max(2 * k.latency + k.carrying for k in pair) for pair in pairs]),
        )

    def periods(self, depths: Sequence[int], windows: Sequence[int]) -> NDArray[np.float64]:
        """The periods of all cycles, in one row."""
        passed = np.concatenate(([0], np.cumsum(np.add(depths, 1))))
        chains = self.seconds / (1 + np.abs(passed[None, :] - passed[:, None]))
        return np.concatenate((chains.ravel(), self.notices / windows))


def period(pipeline: EagerPipeline, depths: Sequence[int], windows: Sequence[int]) -> float:
    """Seconds from one micro-batch to the next in the steady state, by the law."""
    law = Law.of(pipeline)
    return float(max([law.floor, *law.periods(depths, windows)]))
