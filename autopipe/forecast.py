"""How long a plan's step takes, by the longest path through its programs, from the plan alone.

seconds of a stage      plan.stages[i].predicted
seconds of a transfer   the bytes of what crosses, the link between the nodes of the two ranks
seconds of a sum        ring all-reduce of a stage's gradients over dp ranks, and copies of them in
                        the rank's own memory, to and from what is sent; none under ZeRO-3
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from autopipe import cluster, programs, simulate
from autopipe.communication import Topology, gradient_sum, slowest
from autopipe.law import Boundary, Pipeline
from autopipe.plan import Plan, Prediction, Transfer
from autopipe.schedule import Channel, Flow, holders
from autopipe.simulate import Costs, Timeline

_BITS = {"bool": 8}
"""Of the dtypes whose name does not say it."""


def timeline(plan: Plan) -> Timeline:
    """When everything in a plan's step happens, as predicted.

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
    return replace(plan, prediction=Prediction(found.seconds, found.bubble))


def costs(plan: Plan) -> Costs:
    """The seconds of everything in a plan's step."""
    placed, wires = holders(programs.compute(plan)), _Wires.of(plan)
    moved = crossing_bytes(plan)

    def link(channel: Channel) -> simulate.Link:
        wire = wires.link(placed[channel.source], placed[channel.target])
        return simulate.Link(wire.latency, wire.bandwidth, moved.get(channel, 0))

    predicted = [stage.predicted for stage in plan.stages]
    return Costs.of(
        [stage.forward_seconds for stage in predicted],
        [stage.backward_seconds for stage in predicted],
        reduce=[
            wires.reduce(placed[index], stage.memory.gradients)
            for index, stage in enumerate(predicted)
        ],
        links=link,
    )


def crossing_bytes(plan: Plan) -> dict[Channel, int]:
    """Bytes of a micro-batch's tensors, and of their gradients, between each pair of stages."""
    rows = plan.batch.rows // (plan.mesh.dp * plan.batch.micro_batches)
    moved: Counter[Channel] = Counter()
    for index, stage in enumerate(plan.stages):
        for sent in stage.sends:
            size = transfer_bytes(sent, rows)
            moved[Channel(index, sent.peer, Flow.ACTIVATION)] += size
            if sent.gradient:
                moved[Channel(sent.peer, index, Flow.GRADIENT)] += size
    return dict(moved)


def pipeline(plan: Plan, *, held: Sequence[int], room: Sequence[int]) -> Pipeline:
    """What `autopipe.ahead` has to know of a plan with a stage on each rank.

    Args:
        held: bytes that one more micro-batch in flight takes in each stage.
        room: bytes that each stage has left with depths of 0 and windows of 1.
    """
    found = costs(plan)
    boundaries = []
    for j in range(len(plan.stages) - 1):
        there, back = Channel(j, j + 1, Flow.ACTIVATION), Channel(j + 1, j, Flow.GRADIENT)
        wire, returning = found.links(there), found.links(back)
        posted = int(max(wire.bytes, returning.bytes))
        boundaries.append(
            Boundary(wire.latency, wire.bandwidth, wire.bytes, returning.bytes, posted)
        )
    micro_batches = plan.batch.micro_batches
    return Pipeline(found.forward, found.backward, boundaries, micro_batches, held, room)


def transfer_bytes(transfer: Transfer, rows: int) -> int:
    """Bytes of a crossing tensor of a micro-batch of `rows` rows."""
    bits = _BITS.get(transfer.dtype) or int(re.findall(r"\d+", transfer.dtype)[0])
    return _elements(transfer.shape, rows) * bits // 8


def _elements(shape: Sequence[int | str], rows: int) -> int:
    """The product of dims that are expressions in b; nearly all are numbers, `b` or `12*b`."""
    found = [_MULTIPLE.fullmatch(str(dim)) for dim in shape]
    if all(found):
        return math.prod(
            int(dim[1] or 1) * (rows if dim[0].endswith("b") else 1) for dim in found if dim
        )
    import sympy  # half a second, which a plan that is only looked at can be spared

    product = sympy.prod([sympy.sympify(dim) for dim in shape])
    return int(sympy.sympify(product).subs("b", rows))


_MULTIPLE = re.compile(r"(\d+)(?:\*b)?|b")


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

    def reduce(self, pp: int, size: int) -> float:
        """Seconds in which a stage's gradients are summed (`autopipe.communication`).

        Under ZeRO-1 it is its two halves, of which the second begins the next step. Under ZeRO-3
        every backward has summed what it made.
        """
        mesh = self.plan.mesh
        if mesh.dp == 1 or self.plan.fully_sharded:
            return 0.0
        levels = self.topology.levels(self._replicas(pp))
        return gradient_sum(size, levels, mesh.tp, self.plan.zero, self.plan.cluster.copying)
