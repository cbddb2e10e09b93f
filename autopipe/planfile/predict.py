"""Predict the seconds of a plan's step, by the longest path through its programs.

seconds of a stage      plan.stages[i].predicted
seconds of a transfer   the bytes of what crosses, the link between the nodes of the two ranks
seconds of a sum        ring all-reduce of a stage's gradients over dp ranks, and copies to and from
                        the sent buffers in the rank's own memory; under ZeRO-2 the gathering of
                        parameters for the next step; none under ZeRO-3. GPUs sum while the last
                        backward runs: what that hides is left out. Gradients of tied parameters are
                        summed over all ranks that have them, once the first of their stages has run
                        its last backward

A loss over the whole batch adds its own seconds, between two passes. The first pass is added to the
second: a forward has the seconds of both, and activations cross twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from autopipe.cluster import cluster
from autopipe.cluster.collective_time import (
    Topology,
    gradient_sum,
    half_sum,
    slowest,
    summed_beside,
)
from autopipe.cluster.efficiency import BESIDE
from autopipe.planfile import programs
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Prediction, StagePrediction, Transfer
from autopipe.planfile.turns import taking_turns
from autopipe.schedules import simulate
from autopipe.schedules.instructions import Channel, Flow, holders, splits
from autopipe.schedules.simulate import Costs, Timeline
from autopipe.util import dims, dtypes


def timeline(plan: Plan) -> Timeline:
    """The predicted times of everything in a plan's step.

    Raises:
        ScheduleError: the plan's programs cannot run to their end.
    """
    return simulate.simulate(programs.step(plan), costs(plan))


def with_prediction(plan: Plan) -> Plan:
    """The plan with the step that its own numbers predict.

    Raises:
        ScheduleError: as `timeline`.
    """
    found = timeline(plan)
    step = found.seconds + plan.loss_seconds
    if not plan.loss_seconds:
        return replace(plan, prediction=Prediction(step, found.bubble))
    computing = (1 - found.bubble) * found.seconds + plan.loss_seconds / plan.mesh.pp
    return replace(plan, prediction=Prediction(step, 1 - computing / step))


def costs(plan: Plan) -> Costs:
    """The seconds of everything in a plan's step."""
    placed, wires = holders(programs.compute(plan)), _Wires.of(plan)
    moved, last = crossing_bytes(plan), last_share(plan)

    def link(channel: Channel) -> simulate.LinkTime:
        wire = wires.link(placed[channel.source], placed[channel.target])
        return simulate.LinkTime(wire.latency, wire.bandwidth, moved.get(channel, 0))

    predicted = [stage.predicted for stage in plan.stages]
    return Costs.of(
        [stage.forward_seconds for stage in predicted],
        [stage.backward_seconds for stage in predicted],
        reduce=[
            found.after + max(BESIDE * found.beside, found.beside - last * stage.backward_seconds)
            for found, stage in zip(sums(plan), predicted, strict=True)
        ],
        links=link,
    )


class StageSum(NamedTuple):
    """Seconds of summing a stage's gradients: those that may run in its last backward, on GPUs, and
    those that follow it."""

    beside: float
    after: float


def sums(plan: Plan) -> list[StageSum]:
    """The sum of each stage."""
    placed, wires = holders(programs.compute(plan)), _Wires.of(plan)
    found = []
    for index, stage in enumerate(plan.stages):
        own = taking_turns(plan.stages, index)
        alone = wires.reduce([placed[i] for i in own], stage.predicted)
        tied = summed_together(plan, index)
        if tied and min(tied) in own:
            ranks = sorted({placed[i] for i in tied})
            alone = alone._replace(after=alone.after + wires.reduce_tied(ranks, stage.predicted))
        found.append(alone)
    return found


def summed_together(plan: Plan, index: int) -> tuple[int, ...]:
    """The stages whose gradients of tied parameters are summed with those of a stage, which is one
    of them; empty if it has none that a stage on another pipeline rank has too."""
    stages = plan.stages
    if not stages[index].predicted.tied:
        return ()
    names = {*stages[index].parameters}
    return tuple(
        other
        for other, stage in enumerate(stages)
        if stage.predicted.tied and not names.isdisjoint(stage.parameters)
    )


def last_share(plan: Plan) -> float:
    """The share of its last backward in which a stage makes gradients: half where that is split."""
    return 0.5 if splits(programs.compute(plan)) else 1.0


def crossing_bytes(plan: Plan) -> dict[Channel, int]:
    """Bytes of a micro-batch's tensors, and of their gradients, between each pair of stages."""
    rows = plan.batch.microbatch_rows(plan.mesh.dp)
    moved: Counter[Channel] = Counter()
    for index, stage in enumerate(plan.stages):
        for sent in stage.sends:
            size = transfer_bytes(sent, rows)
            moved[Channel(index, sent.peer, Flow.ACTIVATION)] += size * plan.forwards
            if sent.gradient:
                moved[Channel(sent.peer, index, Flow.GRADIENT)] += size
    return dict(moved)


def transfer_bytes(transfer: Transfer, rows: int) -> int:
    """Bytes of a crossing tensor of a micro-batch of `rows` rows.

    Raises:
        PlanError: the tensor's dtype is unknown, or one of its sizes is no expression in b.
    """
    return dims.elements_at(transfer.shape, rows) * dtypes.bytes_of(transfer.dtype)


def devices(plan: Plan) -> list[int]:
    """The number of each rank's device in the cluster."""
    before = [0, *accumulate(plan.cluster.devices_per_node)]
    return [before[place.node] + place.local for place in plan.mesh.places]


@dataclass(frozen=True)
class _Wires:
    """The links between a plan's ranks; `devices` are numbers in the cluster, by rank."""

    plan: Plan
    topology: Topology
    devices: Sequence[int]

    @staticmethod
    def of(plan: Plan) -> _Wires:
        return _Wires(plan, Topology.of(plan.cluster), devices(plan))

    def _replicas(self, pp: int) -> list[int]:
        """The devices of a pipeline rank's replicas."""
        mesh = self.plan.mesh
        return [self.devices[mesh.rank(pp, dp)] for dp in range(mesh.dp)]

    def link(self, source: int, target: int) -> cluster.Link:
        """The slowest of the links between two ranks of a pipeline, over all pipelines.

        All ranks of a stage send at once; over a link that is shared they take turns.
        """
        mesh = self.plan.mesh
        ends = zip(self._replicas(source), self._replicas(target), strict=True)
        return slowest(self.topology.pair(*pair) for pair in ends).wire(mesh.dp * mesh.tp)

    def reduce(self, pps: Sequence[int], stage: StagePrediction) -> StageSum:
        """Seconds in which a stage's gradients are summed (`cluster.collective_time`).

        The sum is over the stage's replicas, on its pipeline rank or on those that take turns.
        Under ZeRO-1 it has two halves; the second one, which may have fewer bits, begins the next
        step. Under ZeRO-2 every backward has done the first half already; under ZeRO-3 both.
        """
        mesh, size = self.plan.mesh, stage.memory.gradients
        replicas = [device for pp in pps for device in self._replicas(pp)]
        if len(replicas) == 1 or self.plan.fully_sharded:
            return StageSum(0.0, 0.0)
        levels, zero = self.topology.levels(replicas), self.plan.zero
        copying = self.plan.cluster.copying
        if self.plan.scatters:
            whole = size * mesh.dp  # of which a rank holds its rows
            gathered = whole * self.plan.gathered_share
            return StageSum(0.0, half_sum(gathered, levels, mesh.tp, copying))
        size -= stage.tied
        moved = size * (1 + self.plan.gathered_share) / 2 if zero else size
        seconds = gradient_sum(moved, levels, mesh.tp, zero, copying)
        if not self.plan.cluster.all_gpus:
            return StageSum(0.0, seconds)
        beside = summed_beside(size, levels, mesh.tp, zero, copying)
        return StageSum(beside, seconds - beside)

    def reduce_tied(self, pps: Sequence[int], stage: StagePrediction) -> float:
        """Seconds in which gradients are summed that stages on several pipeline ranks have.

        Under ZeRO-2 and 3 each replica sums its rows of them.
        """
        plan, mesh, size = self.plan, self.plan.mesh, stage.tied
        every = [self._replicas(pp) for pp in pps]
        copying = plan.cluster.copying
        if plan.scatters:
            levels = self.topology.levels([devices[0] for devices in every])
            return gradient_sum(size / mesh.dp, levels, mesh.tp * mesh.dp, 0, copying)
        levels = self.topology.levels([device for devices in every for device in devices])
        moved = size * (1 + plan.gathered_share) / 2 if plan.zero_at_work else size
        return gradient_sum(moved, levels, mesh.tp, plan.zero_at_work, copying)
