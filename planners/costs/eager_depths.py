"""How far to run ahead: windows and depths for eager 1F1B, by the longest path, within memory.

The law of `planners.model.eager_period` makes a proposal: from depths of 0 it raises, one by one,
the depth or window that shortens the period most for its bytes. The proposal is then simulated,
raised further where that pays, and lowered where that costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.planfile import predict
from autopipe.planfile.contents import Plan
from autopipe.planners.model.eager_period import (
    EagerPipeline,
    Law,
    StageLink,
    bound,
    check,
    extra_bytes,
    flights,
)
from autopipe.schedules.generators import eager_one_f_one_b
from autopipe.schedules.instructions import Channel, Flow, Kind
from autopipe.schedules.simulate import Costs, Timeline, simulate
from autopipe.schedules.transfers import Edge, insert

WORTH = 0.005
"""The share of a step that is worth a byte; and what may be lost where bytes are saved."""

EFFORT = 100_000
"""Instructions simulated at most each time anything is raised or lowered: a third of a second."""


@dataclass(frozen=True)
class Ahead:
    """Depths and windows, one per boundary; their bytes and the step that they give.

    Args:
        depths: micro-batches in flight besides those of 1F1B.
        windows: receives posted ahead.
        bytes: of each stage, beyond depths of 0 and windows of 1.
        seconds: the predicted step, sums of gradients aside.
        bound: seconds that no depths and windows can go below.
    """

    depths: tuple[int, ...]
    windows: tuple[int, ...]
    bytes: tuple[int, ...]
    seconds: float
    bound: float


def pipeline(plan: Plan, *, held: Sequence[int], room: Sequence[int]) -> EagerPipeline:
    """The numbers of a plan, with one stage on each rank, from which depths are chosen.

    Args:
        held: bytes that one more micro-batch in flight takes in each stage.
        room: bytes that each stage has left with depths of 0 and windows of 1.
    """
    costs = predict.costs(plan)
    boundaries = []
    for j in range(len(plan.stages) - 1):
        forth, back = Channel(j, j + 1, Flow.ACTIVATION), Channel(j + 1, j, Flow.GRADIENT)
        wire, returning = costs.links(forth), costs.links(back)
        posted = int(max(wire.bytes, returning.bytes))
        boundaries.append(
            StageLink(wire.latency, wire.bandwidth, wire.bytes, returning.bytes, posted)
        )
    micro_batches = plan.batch.micro_batches
    return EagerPipeline(costs.forward, costs.backward, boundaries, micro_batches, held, room)


_Choice = tuple[tuple[int, ...], tuple[int, ...]]  # depths, windows


def choose(pipeline: EagerPipeline) -> Ahead:
    """Choose depths and windows: a short step, and no bytes that do not shorten it.

    1. By the law, from depths of 0: raise the one that shortens the period most for its bytes, as
       long as it fits and the period is above that of computing and wires alone.
    2. Simulated: raise those that shorten the step by more than a share `WORTH`, best for its
       bytes first.
    3. Simulated: lower those that cost no more than `WORTH` in all; then 2 again.

    The result is the same for the same pipeline, and no stage gets more than its room; without
    room depths are 0 and windows 1. For a pipeline too large for `EFFORT` it is the law's proposal.

    Raises:
        ScheduleError: the numbers are not those of one pipeline.
    """
    check(pipeline)
    proposed = _proposed(pipeline)
    trial = _Trial(pipeline, flights(pipeline, proposed[0])[0])
    best = _lowered(pipeline, trial, _raised(pipeline, trial, proposed))
    again = _raised(pipeline, trial, best)  # what was lowered has left room
    if again != best:
        best = _lowered(pipeline, trial, again)
    return Ahead(*best, extra_bytes(pipeline, *best), trial.seconds(best), bound(pipeline))


def _proposed(pipeline: EagerPipeline) -> _Choice:
    """Raise what is best for its bytes until the period is the floor's or nothing fits."""
    law = Law.of(pipeline)
    hidden = law.floor * (1 + WORTH)
    choice: _Choice = ((0,) * len(pipeline.boundaries), (1,) * len(pipeline.boundaries))
    while slowness := _slowness(law.periods(*choice), hidden):
        gains = []
        for other in _raises(pipeline, choice):
            gain = slowness - _slowness(law.periods(*other), hidden)
            if gain > 0:
                gains.append((gain / _more_bytes(pipeline, choice, other), other))
        if not gains:
            break
        choice = max(gains, key=lambda found: found[0])[1]
    return choice


def _slowness(periods: NDArray[np.float64], hidden: float) -> float:
    """A smooth maximum of the periods: their mean to the power of 32.

    A pipeline has many equal cycles. Raising one depth leaves their maximum unchanged, although it
    is progress; this mean falls, and is hardly above the maximum.
    """
    exposed = periods[periods > hidden]
    if not len(exposed):
        return 0.0
    largest = exposed.max()
    return float(largest * ((exposed / largest) ** 32).sum() ** (1 / 32))


def _raises(pipeline: EagerPipeline, choice: _Choice) -> Iterator[_Choice]:
    """Every choice with the depth or the window of one boundary raised by one, that fits."""
    depths, windows = choice
    flying = flights(pipeline, depths)
    for j in range(len(pipeline.boundaries)):
        deeper = _changed(depths, [j], 1), windows
        if flying[j] < pipeline.micro_batches and _fits(pipeline, deeper):
            yield deeper
        wider = depths, _changed(windows, [j], 1)
        if windows[j] < pipeline.micro_batches and _fits(pipeline, wider):
            yield wider


def _exchanges(pipeline: EagerPipeline, choice: _Choice) -> Iterator[_Choice]:
    """Depth and window of a boundary raised together; a depth that does not fit, for another."""
    depths, windows = choice
    for j in range(len(pipeline.boundaries)):
        deeper = _changed(depths, [j], 1)
        if _fits(pipeline, (deeper, windows)):
            others = [(deeper, _changed(windows, [j], 1))]
        else:
            others = [(_changed(deeper, [k], -1), windows) for k, e in enumerate(depths) if e]
        yield from (other for other in others if other != choice and _fits(pipeline, other))


def _changed(numbers: tuple[int, ...], where: Sequence[int], by: int) -> tuple[int, ...]:
    return tuple(number + by * (j in where) for j, number in enumerate(numbers))


def _fits(pipeline: EagerPipeline, choice: _Choice) -> bool:
    found = extra_bytes(pipeline, *choice)
    return all(size <= room for size, room in zip(found, pipeline.room, strict=True))


def _more_bytes(pipeline: EagerPipeline, choice: _Choice, other: _Choice) -> int:
    """The bytes that `other` takes beyond `choice`, all stages together; at least 1, for ratios."""
    return max(1, sum(extra_bytes(pipeline, *other)) - sum(extra_bytes(pipeline, *choice)))


# The simulation.


class _Trial:
    """Predicted steps, each simulated once, and how much simulating is left.

    In a step much longer than its warm-up, only a good three times as many micro-batches as are in
    flight are simulated. The rest are assumed to follow at the pace at which the later half of
    those reach the last stage.
    """

    def __init__(self, pipeline: EagerPipeline, flying: int) -> None:
        self.pipeline = pipeline
        self.micro_batches = min(pipeline.micro_batches, 3 * flying + 16)
        self.left = EFFORT
        self.found: dict[_Choice, float] = {}

    def seconds(self, choice: _Choice) -> float:
        """The predicted step."""
        if choice not in self.found:
            self.found[choice] = self._simulated(choice)
        return self.found[choice]

    def _simulated(self, choice: _Choice) -> float:
        (depths, windows), pipeline, few = choice, self.pipeline, self.micro_batches
        stages = len(pipeline.forward)
        edges = [Edge(j, j + 1, gradient=True) for j in range(stages - 1)]
        programs = insert(eager_one_f_one_b(stages, few, depths), edges, windows)
        self.left -= sum(map(len, programs))
        costs = Costs.of(pipeline.forward, pipeline.backward, links=pipeline.link)
        timeline = simulate(programs, costs)
        rest = pipeline.micro_batches - few
        return timeline.seconds + (rest * _pace(timeline) if rest else 0.0)


def _pace(timeline: Timeline) -> float:
    """Seconds from one micro-batch to the next at the last stage, over the later half of them."""
    ends = timeline.ends[-1]
    found = [
        end
        for instruction, end in zip(timeline.programs[-1], ends, strict=True)
        if instruction.kind is Kind.FORWARD
    ]
    later = found[len(found) // 2 :]
    return (later[-1] - later[0]) / (len(later) - 1)


def _raised(pipeline: EagerPipeline, trial: _Trial, choice: _Choice) -> _Choice:
    """Raise what shortens the step most for its bytes, as long as anything shortens it enough."""
    trial.left = EFFORT
    while trial.seconds(choice) > bound(pipeline) * (1 + WORTH):
        seconds = trial.seconds(choice)
        for others in (_raises, _exchanges):
            gains = []
            for raised in others(pipeline, choice):
                if trial.left < 0:
                    return choice
                gain = seconds - trial.seconds(raised)
                if gain > WORTH * seconds:
                    gains.append((gain / _more_bytes(pipeline, choice, raised), raised))
            if gains:
                choice = max(gains, key=lambda found: found[0])[1]
                break
        else:
            break
    return choice


def _lowered(pipeline: EagerPipeline, trial: _Trial, choice: _Choice) -> _Choice:
    """Lower what can be lowered, whatever saves most bytes first."""
    trial.left = EFFORT
    allowed = trial.seconds(choice) * (1 + WORTH)
    refused: set[_Choice] = set()
    while True:
        others = [other for other in _lowers(pipeline, choice) if other not in refused]
        if not others or trial.left < 0:
            return choice
        other = min(others, key=lambda other: sum(extra_bytes(pipeline, *other)))
        if trial.seconds(other) <= allowed:
            choice = other
        else:
            refused.add(other)


def _lowers(pipeline: EagerPipeline, choice: _Choice) -> Iterator[_Choice]:
    """Every choice with depths or windows lowered by one: of all boundaries alike, or of one."""
    depths, windows = choice
    alike: dict[tuple[StageLink, int, int], list[int]] = defaultdict(list)
    for j, key in enumerate(zip(pipeline.boundaries, depths, windows, strict=True)):
        alike[key].append(j)
    for (_, depth, window), where in alike.items():
        for some in [where, *([j] for j in where if len(where) > 1)]:
            if depth > 0:
                yield _changed(depths, some, -1), windows
            if window > 1:
                yield depths, _changed(windows, some, -1)
