"""A planner's answer written down as a `Plan`: stages by name, exact bytes, ranks on devices.

The estimate that chose the plan adds up parts; here the chosen stages are rehearsed and their
programs walked, so that a plan's bytes are those its run will hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe import assemble, fingerprint
from autopipe.blocks import Block, classes
from autopipe.cluster import Cluster
from autopipe.dataflow import Dataflow
from autopipe.errors import InfeasibleError
from autopipe.estimate import Estimate
from autopipe.footprint import footprint
from autopipe.graph import Ref, bytes_at
from autopipe.partition import Stage, partition
from autopipe.plan import (
    FORMAT,
    Batch,
    BlockClass,
    Boundary,
    Memory,
    Mesh,
    Place,
    Plan,
    PlannerNote,
    Prediction,
    StagePlan,
    StagePrediction,
    Transfer,
)
from autopipe.planners import Answer
from autopipe.problem import Decision
from autopipe.profile import Units
from autopipe.rehearsal import Rehearsal, rehearse
from autopipe.trace import Trace

WINDOW = 2
"""Receives posted ahead per boundary: one being filled while one is computed on."""


@dataclass(frozen=True)
class Draft:
    """All that goes into a plan but the planner's answer.

    Attributes:
        rows: of the whole batch.
        memory: bytes that a device may hold.
        planner, optimizer: their names.
        optimizer_factor: as the problem has it.
        versions, source: as the plan has them.
    """

    traced: Trace
    flow: Dataflow
    blocks: tuple[Block, ...]
    units: Units
    cluster: Cluster
    rows: int
    memory: int
    precision: str
    planner: str
    optimizer: str
    optimizer_factor: float
    versions: dict[str, str]
    source: str | None

    def plan(self, answer: Answer) -> Plan:
        """The plan that a planner's answer makes.

        Raises:
            Overflow: a stage's program holds more than the estimate said, and more than a device.
        """
        decision, estimate = answer.decision, answer.estimate
        cuts = [self.units.starts[cut] for cut in decision.cuts]
        stages = partition(self.flow, cuts)
        rows = self.rows // (decision.dp * decision.micro_batches)
        rehearsal = rehearse(self.traced.graph, stages, self.blocks, rows)
        windows = [WINDOW] * (decision.pp - 1)
        programs = assemble.step_programs(
            decision.schedule, stages, rehearsal.boundaries, decision.micro_batches, windows
        )
        peaks = [
            footprint(program, assemble.sizes(stage, rehearsal.boundaries, kept))
            for program, stage, kept in zip(programs, stages, rehearsal.saved, strict=True)
        ]
        memories = [
            self._memory(stage, peak["activations"], peak["transfers"])
            for stage, peak in zip(stages, peaks, strict=True)
        ]
        _check_fits(memories, self.memory, decision)
        return Plan(
            format=FORMAT,
            versions=self.versions,
            source=self.source,
            fingerprint=fingerprint.fingerprint(self.traced.graph),
            trail=fingerprint.trail(self.traced.graph),
            inputs=self.traced.inputs,
            reads=self.traced.reads,
            cluster=self.cluster,
            mesh=_mesh(self.cluster, decision),
            batch=Batch(self.rows, decision.micro_batches),
            precision=self.precision,
            optimizer=self.optimizer,
            schedule=decision.schedule,
            boundaries=tuple(Boundary(window, 0) for window in windows),
            blocks=tuple(BlockClass(n, m) for n, m in classes(self.blocks).items()),
            stages=tuple(
                self._stage(stage, rehearsal, estimate, used)
                for stage, used in zip(stages, memories, strict=True)
            ),
            prediction=Prediction(estimate.step_seconds, estimate.bubble),
            planner=PlannerNote(
                self.planner,
                answer.bound_seconds,
                answer.binding,
                answer.alternatives[0] if answer.alternatives else None,
            ),
        )

    def _memory(self, stage: Stage, activations: int, transfers: int) -> Memory:
        graph = self.traced.graph
        sizes = {n: bytes_at(graph.states[n].spec, 1) for n in stage.states}
        of = {kind: 0 for kind in ("parameter", "buffer", "constant")}
        for name, size in sizes.items():
            of[graph.states[name].kind] += size
        trainable = sum(size for n, size in sizes.items() if graph.states[n].trainable)
        return Memory(
            parameters=of["parameter"],
            gradients=trainable,
            optimizer=round(trainable * self.optimizer_factor),
            buffers=of["buffer"] + of["constant"],
            activations=activations,
            transfers=transfers,
        )

    def _stage(
        self, stage: Stage, rehearsal: Rehearsal, estimate: Estimate, memory: Memory
    ) -> StagePlan:
        graph = self.traced.graph

        def transfer(ref: Ref, peer: int, receiver: int) -> Transfer:
            spec = graph.spec(ref)
            shape = tuple(dim if isinstance(dim, int) else str(dim) for dim in spec.shape)
            back = receiver in rehearsal.boundaries[ref].gradients
            return Transfer(str(ref), shape, str(spec.dtype).removeprefix("torch."), peer, back)

        predicted = estimate.stages[stage.index]
        return StagePlan(
            first=graph.nodes[stage.first].name,
            last=graph.nodes[stage.stop - 1].name,
            nodes=len(stage.nodes),
            parameters=tuple(n for n in stage.states if graph.states[n].kind == "parameter"),
            receives=tuple(transfer(ref, peer, stage.index) for ref, peer in stage.receives),
            sends=tuple(transfer(ref, peer, peer) for ref, peer in stage.sends),
            recompute=(),
            zero=0,
            predicted=StagePrediction(
                predicted.forward_seconds, predicted.backward_seconds, memory
            ),
        )


class Overflow(InfeasibleError):
    """The exact bytes of a stage are `bytes` more than a device may hold."""

    def __init__(self, message: str, bytes: int) -> None:
        super().__init__(message, hint="more stages, more micro-batches, or a higher memory limit")
        self.bytes = bytes


def _check_fits(memories: Sequence[Memory], limit: int, decision: Decision) -> None:
    """The last word on memory: what the programs hold, to the byte."""
    for index, memory in enumerate(memories):
        if memory.peak > limit:
            raise Overflow(
                f"no plan fits {limit} bytes a device: of the nearest (pp={decision.pp} "
                f"dp={decision.dp} micro_batches={decision.micro_batches}) stage {index} needs "
                f"{memory.peak} bytes, {memory.peak - limit} too many",
                memory.peak - limit,
            )


def _mesh(cluster: Cluster, decision: Decision) -> Mesh:
    places = []
    for rank in range(decision.pp * decision.dp):
        node, local, device = cluster.device_at(rank)
        name = "cpu" if device.kind == "cpu" else f"cuda:{local}"
        places.append(Place(rank, *divmod(rank, decision.dp), 0, node, local, name))
    return Mesh(decision.pp, decision.dp, 1, tuple(places))
