"""A planner's answer written down as a `Plan`: stages by name, exact bytes, ranks on devices.

The estimate that chose the plan adds up parts; here the chosen stages are rehearsed and their
programs walked, so that a plan's bytes are those its run will hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from autopipe import assemble, fingerprint, numbers, programs
from autopipe.ahead import choose
from autopipe.blocks import Block
from autopipe.cluster import Cluster
from autopipe.dataflow import Dataflow
from autopipe.degrees import Degree
from autopipe.errors import InfeasibleError, ScheduleError
from autopipe.estimate import Estimate
from autopipe.fake import fake_mode
from autopipe.forecast import pipeline, with_prediction
from autopipe.graph import Dim, Ref, State, bytes_at
from autopipe.lower import lower
from autopipe.machine import Machine
from autopipe.partition import Stage, partition
from autopipe.placed import write_down
from autopipe.plan import (
    FORMAT,
    Alternative,
    Batch,
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
    data_parallel,
)
from autopipe.planners import Answer
from autopipe.problem import Constraints, Decision
from autopipe.recompute import within
from autopipe.rehearsal import Known, Rehearsal, fake_state
from autopipe.runtime.gradients import BUCKET_BYTES
from autopipe.runtime.units import owners
from autopipe.schedule import format_programs, holders, splits
from autopipe.schedules import named
from autopipe.shallow import rehearse_deep
from autopipe.stage_costs import EAGER
from autopipe.trace import Trace
from autopipe.units import Units

WINDOW = 2
"""Receives posted ahead per boundary: one being filled while one is computed on."""

MOST_ALTERNATIVES = 8
"""Other meshes that a plan tells of, beside data parallelism alone."""


@dataclass(frozen=True)
class Draft:
    """All that goes into a plan but the planner's answer.

    Attributes:
        degree: the model as a tensor-parallel rank runs it.
        rows: of the whole batch.
        machine: the devices, and the bytes that they may hold.
        planner, optimizer: their names.
        optimizer_factor, constraints: as the problem has them.
        reruns, even: as `profile.Profiled` has them.
        versions, source: as the plan has them.
        known: what rehearsals have learnt so far.
    """

    degree: Degree
    units: Units
    cluster: Cluster
    rows: int
    machine: Machine
    precision: str
    planner: str
    optimizer: str
    optimizer_factor: float
    reruns: tuple[str, ...]
    even: bool
    constraints: Constraints
    versions: dict[str, str]
    source: str | None
    known: Known = field(default_factory=dict)

    @property
    def traced(self) -> Trace:
        """What a rank runs, uncut."""
        return self.degree.trace

    @property
    def flow(self) -> Dataflow:
        """Its dataflow."""
        return self.degree.flow

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Its blocks."""
        return self.degree.blocks

    def plan(self, answer: Answer) -> Plan:
        """The plan that a planner's answer makes.

        Raises:
            Overflow: a stage's program holds more than the estimate said, and more than a device.
        """
        decision, estimate = answer.decision, answer.estimate
        frame = decision.frame
        cuts = [self.units.starts[cut] for cut in decision.cuts]
        stages = partition(self.flow, cuts)
        rows = self.rows // (frame.dp * frame.micro_batches)
        graph = self.traced.graph
        numbers = {number for blocks in decision.recompute for number in blocks}
        again = tuple(path for number, path in enumerate(self.reruns) if number in numbers)
        rehearsal = rehearse_deep(
            self.flow,
            stages,
            self.blocks,
            rows,
            recompute=again,
            precision=self.precision,
            halves=self._splits(frame.schedule),
            even=self.even,
            known=self.known,
        )
        most = max(device.memory for device in self.cluster.devices)
        gathered = [0] * len(stages)
        if frame.fully_sharded:
            rehearsal, gathered = self._sharded(stages, rehearsal, rows, again)
        whole = self.degree.whole.graph
        classes, states, collectives = write_down(
            whole, self.degree.whole_blocks, self.degree.sharding, graph, rows
        )
        written = format_programs(self.constraints.programs).splitlines()
        found = Plan(
            format=FORMAT,
            versions=self.versions,
            source=self.source,
            fingerprint=fingerprint.fingerprint(whole),
            trail=fingerprint.trail(whole),
            inputs=self.traced.inputs,
            reads=self.traced.reads,
            cluster=self.cluster,
            mesh=_mesh(self.cluster, self.machine, decision, self.degree.tp),
            batch=Batch(self.rows, frame.micro_batches),
            precision=self.precision,
            optimizer=self.optimizer,
            schedule=frame.schedule,
            programs=tuple(written),
            boundaries=self._asked(decision),
            blocks=classes,
            stages=tuple(
                self._stage(stage, rehearsal, estimate, again, frame.zero) for stage in stages
            ),
            prediction=Prediction(0.0, 0.0),
            planner=PlannerNote(
                self.planner,
                estimate.step_seconds,
                answer.bound_seconds,
                answer.binding,
                *_told(answer.alternatives),
                limits=tuple(
                    sorted({limit for limit in self.constraints.memory or () if limit < most})
                ),
            ),
            states=states,
            collectives=collectives,
        )
        groups = self.machine.groups(frame.dp)
        row = decision.groups or range(frame.pp)
        limits = [groups[group].memory for group in row]
        if frame.schedule == EAGER and self.constraints.depth is None:
            found = self._ahead(found, stages, rehearsal, gathered, limits)
        found = self._with_memory(found, stages, rehearsal, gathered)
        _check_fits(found, limits)
        return with_prediction(found)

    def _splits(self, schedule: str) -> bool:
        """Whether backwards are split, into those for inputs and those for weights."""
        written = self.constraints.programs
        return splits(written) if written else named(schedule).splits

    def _asked(self, decision: Decision) -> tuple[Boundary, ...]:
        """Windows and depths as asked for, or the usual ones."""
        depth = self.constraints.depth or 0
        if decision.frame.schedule != EAGER and depth:
            raise ScheduleError(
                f"depth={depth} was asked for, and {decision.frame.schedule} takes none",
                hint=f"schedule={EAGER!r} does",
            )
        window = self.constraints.window or WINDOW
        return (Boundary(window, depth),) * (decision.stages - 1)

    def _sharded(
        self, stages: Sequence[Stage], rehearsal: Rehearsal, rows: int, recompute: tuple[str, ...]
    ) -> tuple[Rehearsal, list[int]]:
        """The rehearsal under ZeRO-3, and the bytes of each stage that are whole in its backward.

        Parameters come and go, and so do their copies in low precision: what a step has one of,
        each micro-batch in flight has then, but for what blocks that run again keep for themselves.
        """
        graph, saved, gathered = self.traced.graph, list(rehearsal.saved), []
        again = {p for b in self.blocks if b.path in recompute for p in range(b.first, b.stop)}
        for stage in stages:
            with fake_mode():
                lowered = lower(
                    graph,
                    stage,
                    self.blocks,
                    {name: fake_state(graph, name) for name in stage.states},
                    None,
                    rows,
                    last=stage.index == len(stages) - 1,
                    recompute=within(stage, self.blocks, recompute),
                    precision=self.precision,
                )
            for name in lowered.low:
                own = [p for p in self.flow.users[State(name)] if p in stage.nodes]
                if not again.issuperset(own):
                    saved[stage.index] += bytes_at(graph.states[name].spec, 1) // 2
            parameters = [n for n in stage.states if graph.states[n].kind == "parameter"]
            together: Counter[str | None] = Counter()
            for name, block in owners(_tree(stage.states), lowered.module, parameters).items():
                together[block] += bytes_at(graph.states[name].spec, 1)
            outside = together.pop(None, 0)
            # As `autopipe.runtime.fully_sharded` has it.
            gathered.append(2 * outside + 7 * max(together.values(), default=0))
        low = (0,) * len(stages)
        return replace(rehearsal, saved=tuple(saved), low=low), gathered

    def _ahead(
        self,
        plan: Plan,
        stages: Sequence[Stage],
        rehearsal: Rehearsal,
        gathered: Sequence[int],
        limits: Sequence[int],
    ) -> Plan:
        """The plan with the depths and windows that its links ask for, as far as memory allows."""
        least = replace(plan, boundaries=(Boundary(1, 0),) * len(plan.boundaries))
        holding = self._with_memory(least, stages, rehearsal, gathered)
        chosen = choose(
            pipeline(
                holding,
                held=[
                    rehearsal.saved[stage.index]
                    + sum(rehearsal.boundaries[ref].bytes for ref, _ in stage.receives)
                    for stage in stages
                ],
                room=[
                    limit - stage.predicted.memory.peak
                    for limit, stage in zip(limits, holding.stages, strict=True)
                ],
            )
        )
        windows = chosen.windows
        if self.constraints.window is not None:
            windows = (self.constraints.window,) * len(plan.boundaries)
        return replace(plan, boundaries=tuple(map(Boundary, windows, chosen.depths)))

    def _with_memory(
        self, plan: Plan, stages: Sequence[Stage], rehearsal: Rehearsal, gathered: Sequence[int]
    ) -> Plan:
        """The plan with the bytes that its programs hold."""
        windows = [boundary.window for boundary in plan.boundaries]
        compute = programs.compute(plan)
        peaks = assemble.footprints(
            assemble.step_programs(
                compute, stages, rehearsal.boundaries, windows, programs.sends_ahead(plan)
            ),
            stages,
            rehearsal,
        )
        placed = holders(compute)
        memories: list[Memory] = []
        for stage, peak in zip(stages, peaks, strict=True):
            with_it = [s for s in stages if placed[s.index] == placed[stage.index]]
            earlier = {n for s in with_it if s.index < stage.index for n in s.states}
            own = [name for name in stage.states if name not in earlier]
            whole = rehearsal.low[stage.index]
            if stage is max(with_it, key=lambda s: gathered[s.index]):  # one runs at a time
                whole += gathered[stage.index]
            memories.append(self._memory(own, peak, whole, plan))
        return replace(
            plan,
            stages=tuple(
                replace(stage, predicted=replace(stage.predicted, memory=memory))
                for stage, memory in zip(plan.stages, memories, strict=True)
            ),
        )

    def _memory(self, names: Sequence[str], peak: Counter[str], whole: int, plan: Plan) -> Memory:
        """What a stage holds of states that no stage before it on its device has."""
        graph, dp, zero = self.traced.graph, plan.mesh.dp, plan.zero
        states = {name: graph.states[name] for name in names}
        sizes = {name: bytes_at(state.spec, 1) for name, state in states.items()}
        # Rows are dealt out; the first rank has the most.
        dealt = {name: _share(state.spec.shape, sizes[name], dp) for name, state in states.items()}
        parameters = [name for name, state in states.items() if state.kind == "parameter"]
        trained = [name for name, state in states.items() if state.trainable]
        held = dealt if zero == 3 else sizes
        updated = dealt if zero else sizes
        return Memory(
            parameters=sum(held[name] for name in parameters) + whole,
            gradients=sum(held[name] for name in trained),
            optimizer=round(sum(updated[name] for name in trained) * self.optimizer_factor),
            buffers=sum(size for name, size in sizes.items() if name not in parameters),
            activations=peak["activations"],
            transfers=peak["transfers"],
            passing=_passing([sizes[name] for name in trained], peak, plan),
        )

    def _stage(
        self,
        stage: Stage,
        rehearsal: Rehearsal,
        estimate: Estimate,
        recompute: tuple[str, ...],
        zero: int,
    ) -> StagePlan:
        graph = self.traced.graph

        def transfer(ref: Ref, peer: int, receiver: int) -> Transfer:
            boundary = rehearsal.boundaries[ref]
            shape = tuple(
                dim if isinstance(dim, int) else str(dim) for dim in graph.spec(ref).shape
            )
            dtype = str(boundary.dtype).removeprefix("torch.")
            return Transfer(str(ref), shape, dtype, peer, receiver in boundary.gradients)

        predicted = estimate.stages[stage.index]
        return StagePlan(
            first=graph.nodes[stage.first].name,
            last=graph.nodes[stage.stop - 1].name,
            nodes=len(stage.nodes),
            parameters=tuple(n for n in stage.states if graph.states[n].kind == "parameter"),
            receives=tuple(transfer(ref, peer, stage.index) for ref, peer in stage.receives),
            sends=tuple(transfer(ref, peer, peer) for ref, peer in stage.sends),
            recompute=within(stage, self.blocks, recompute),
            zero=zero,
            predicted=StagePrediction(
                predicted.forward_seconds, predicted.backward_seconds, Memory(0, 0, 0, 0, 0, 0)
            ),
        )


class Overflow(InfeasibleError):
    """The exact bytes of a stage, `held`, are more than a device may hold, `limit`."""

    def __init__(self, message: str, held: int, limit: int) -> None:
        hint = f"devices, or a memory limit, of {numbers.Amount(held).ceiling(held)}"
        super().__init__(message, hint=hint, shortfall=held - limit)


def _told(
    alternatives: tuple[Alternative, ...],
) -> tuple[Alternative | None, tuple[Alternative, ...]]:
    """The next best mesh and those after it, data parallelism alone among them."""
    if not alternatives:
        return None, ()
    next_best, *others = alternatives
    alone = data_parallel(alternatives)
    rest = [other for other in others[MOST_ALTERNATIVES:] if other == alone]
    return next_best, (*others[:MOST_ALTERNATIVES], *rest)


def _tree(names: Iterable[str]) -> nn.Module:
    """Modules at the paths of the model that have these states."""
    root = nn.Module()
    for name in names:
        place = root
        for part in name.split(".")[:-1]:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
    return root


def _share(shape: Sequence[Dim], size: int, ranks: int) -> int:
    """Bytes of a parameter's rows that the first of so many ranks gets."""
    rows = int(shape[0]) if shape else 1
    return -(-rows // ranks) * size // rows if rows else 0


def _passing(gradients: Sequence[int], peak: Counter[str], plan: Plan) -> int:
    """Bytes of `Memory.passing`.

    From the second micro-batch on, each gradient is made beside the sum that it is added to. A
    bucket is filled at the end, when the last backward has let go of what is at the peak.
    """
    if plan.fully_sharded:
        return 0  # what is gathered is counted with the gradients that it makes
    added = max(gradients, default=0) if plan.batch.micro_batches > 1 else 0
    bucket = min(BUCKET_BYTES, sum(gradients)) if plan.mesh.dp > 1 else 0
    return max(added, bucket - peak.total())


def _check_fits(plan: Plan, limits: Sequence[int]) -> None:
    """The last word on memory: what the programs hold, to the byte, of each rank's limit."""
    placed = holders(programs.compute(plan))
    for rank, limit in enumerate(limits):
        own = [stage for stage, holder in enumerate(placed) if holder == rank]
        held = sum(plan.stages[stage].predicted.memory.peak for stage in own)
        if held > limit:
            names = " and ".join(map(str, own))
            raise Overflow(
                f"no plan fits {numbers.memory(limit)} a device: of the nearest (pp={plan.mesh.pp} "
                f"dp={plan.mesh.dp} micro_batches={plan.batch.micro_batches}) "
                f"stage{'s' if len(own) > 1 else ''} {names} need{'' if len(own) > 1 else 's'} "
                f"{numbers.memory(held)}, {numbers.memory(held - limit)} too many",
                held,
                limit,
            )


def _mesh(cluster: Cluster, machine: Machine, decision: Decision, tp: int) -> Mesh:
    """Every rank's place: pipeline rank `pp` has the devices of its group, in their order."""
    frame, places = decision.frame, []
    for pp, group in enumerate(decision.groups or range(frame.pp)):
        for part in range(frame.dp * tp):
            team, beside = divmod(part, tp)
            means = machine.means[group * frame.dp + team]
            node, local, device = cluster.device_at(means[beside])
            name = "cpu" if device.kind == "cpu" else f"cuda:{local}"
            rank = pp * frame.dp * tp + part
            places.append(Place(rank, pp, team, beside, node, local, name))
    return Mesh(frame.pp, frame.dp, tp, tuple(places))
