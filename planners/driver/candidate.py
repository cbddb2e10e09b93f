"""A candidate: one tensor-parallel degree, and what a model costs at that degree.

    Job, tp --as_one_rank--> Degree --find_units--> Costing --timed----> Problem without bytes
                                                            --counted--> Problem with bytes

Seconds are computed at once. Bytes kept for backward take runs of the model, so they are counted
only when the search needs them: not for a degree whose least step is longer than the steps of two
other meshes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from autopipe.cluster.cluster import Device
from autopipe.cluster.tp_groups import GroupKind, slowest_kind, tp_groups
from autopipe.errors import InfeasibleError
from autopipe.ir.cut_points import find_units
from autopipe.ir.dataflow import written_parameters, written_states
from autopipe.ir.graph import Graph
from autopipe.ir.partition import check_turns
from autopipe.planfile.consistency import ZERO
from autopipe.planners.costs.precision_of import whole_seconds
from autopipe.planners.costs.profile import Costing, Profiled, Sending
from autopipe.planners.costs.tp_degrees import Degree, as_first, as_one_rank, sending_seconds
from autopipe.planners.driver import arguments
from autopipe.planners.driver.request import Job, micro_batch_rows
from autopipe.planners.model.devices import machine_of
from autopipe.planners.model.estimate import PipelineDegrees
from autopipe.planners.model.places import chunks_of
from autopipe.planners.model.problem import EAGER, Config, Constraints, Problem
from autopipe.planners.search.best import Answer, Known
from autopipe.planners.search.bound import bounds
from autopipe.planners.search.registry import PLANNERS
from autopipe.rewriting.for_gpus import for_gpus
from autopipe.stages.gathering import check_written
from autopipe.util.progress import phase
from autopipe.util.stopwatch import Stopwatch


@dataclass(eq=False)
class Candidate:
    """One tensor-parallel degree.

    Attributes:
        degree: the model as the first rank of a tensor-parallel group runs it.
        costing: computes its `Problem`.
        timed: the problem with seconds only.
        watch: gets the seconds of counting bytes and of searching.
    """

    job: Job = field(repr=False)
    degree: Degree
    costing: Costing = field(repr=False)
    timed: Problem = field(repr=False)
    watch: Stopwatch = field(repr=False)
    _counted: Profiled | None = field(default=None, init=False, repr=False)
    _known: Known = field(default_factory=dict, init=False, repr=False)

    def __str__(self) -> str:
        """tp=2: 41 units, micro-batches of 1 to 8 rows on 4 tensor-parallel groups"""
        rows, problem = self.costing.rows, self.timed
        return (
            f"tp={self.tp}: {problem.units} units, micro-batches of {rows[0]} to {rows[-1]} rows "
            f"on {problem.machine.devices} tensor-parallel groups"
        )

    @property
    def tp(self) -> int:
        """Ranks of a tensor-parallel group."""
        return self.degree.tp

    @contextmanager
    def on_first_rank(self) -> Iterator[None]:
        """Within, dry runs are those of the first tensor-parallel rank."""
        with as_first(self.tp), for_gpus(self.job.cluster.has_gpus):
            yield

    @property
    def compiled(self) -> bool:
        """Whether stages run compiled."""
        return self.costing.compiled

    def least_step(self) -> tuple[Config, float]:
        """The config with the lowest bound on its step, and that bound in seconds.

        Raises:
            InfeasibleError: the constraints contradict each other.
        """
        with self.watch("search"):
            return min(bounds(self.timed).items(), key=lambda pair: pair[1])

    def counted(self, *, check: bool = False) -> Profiled:
        """The problem with its bytes; counted once.

        Args:
            check: as for `Costing.profiled`; used in the first call.
        """
        if self._counted is None:
            name = f"counting bytes, {self.tp} tensor-parallel"
            with self.watch("costs"), phase(name), self.on_first_rank():
                self._counted = self.costing.profiled(check=check)
        return self._counted

    def search(
        self,
        problem: Problem,
        incumbents: Sequence[float] = (),
        mesh: PipelineDegrees | None = None,
    ) -> Answer:
        """The answer of the planner that was asked for.

        Args:
            problem: the counted problem, or one with less room (`Problem.beyond`).
            incumbents, mesh: as for `best_answer`.

        Raises:
            InfeasibleError: nothing fits, or (Outdone) nothing that can be among the best two.
        """
        with self.watch("search"):
            planner = PLANNERS[self.job.request.planner]
            return planner(problem, incumbents, mesh, self._known)


def candidate_at(job: Job, tp: int, watch: Stopwatch) -> Candidate:
    """The candidate of one degree, with its seconds.

    Raises:
        InfeasibleError: the model does not divide into `tp` parts.
        AutopipeError: the batch does not divide as the constraints want it.
    """
    with watch("costs"), as_first(tp):
        degree, costing = _costing(job, tp)
        return Candidate(job, degree, costing, costing.timed, watch)


def _zeros(graph: Graph, wanted: int | None) -> tuple[int, ...]:
    """The ZeRO stages to choose from: the wanted one, or all under which the model can run.

    Raises:
        PlanError: ZeRO-3 is wanted, and forward writes a parameter.
    """
    if wanted is None:
        return ZERO[:3] if written_parameters(graph) else ZERO
    if wanted == 3:
        check_written(graph)
    return (wanted,)


def _with_turns(job: Job) -> Constraints:
    """The constraints, without turns for a model whose stages cannot take any.

    Raises:
        PlanError: turns are asked for, and forward writes a state.
        InfeasibleError: they are, and the loss is over the whole batch.
    """
    asked, traced = job.constraints, job.traced
    if asked.turns:
        check_turns(traced.graph)
        if traced.whole is not None:
            raise InfeasibleError(
                "turns were asked for, and a loss over the whole batch: it wants the last stage on "
                "one rank of a pipeline",
                hint="leave out turns",
            )
    if traced.whole is not None or written_states(traced.graph):
        return replace(asked, turns=())
    return asked


def _costing(job: Job, tp: int) -> tuple[Degree, Costing]:
    """The `Costing` of the model at one degree."""
    request, traced, constraints = job.request, job.traced, job.constraints
    precision, graph = request.precision, traced.graph

    def computing(device: Device) -> float:
        return whole_seconds(graph, device, precision)

    tensor_groups = tp_groups(job.cluster, tp, wanted=(constraints.pp or 1) * (constraints.dp or 1))
    wanted, sizes = _rows(job, len(tensor_groups))
    zeros, constraints = _zeros(graph, constraints.zero), _with_turns(job)
    degree = as_one_rank(
        tp,
        traced.trace,
        traced.flow,
        traced.blocks,
        job.cluster,
        wanted[0],
        slowest=slowest_kind(tensor_groups, computing),
        sequence=request.sequence_parallel,
    )
    sending = partial(sending_seconds, ranks=tp, precision=precision)
    seconds = partial(_kind_seconds, degree, sending, precision, wanted[0])
    machine, kinds = machine_of(job.cluster, tensor_groups, constraints.memory, seconds)
    return degree, Costing(
        flow=degree.flow,
        blocks=degree.blocks,
        units=find_units(degree.flow, degree.blocks, at_least=_least_stages(constraints)),
        machine=machine,
        kinds=kinds,
        batch=traced.rows,
        rows=sizes,
        optimizer_factor=job.optimizer_factor,
        window=constraints.window or _usual_window(constraints),
        constraints=constraints,
        precision=precision,
        compiled=job.request.compiled is True,
        recompute=traced.recompute,
        offload=traced.offload,
        zeros=zeros,
        tp=tp,
        sending=sending,
        forwards=1 if traced.whole is None else 2,
        dividing=degree.dividing,
    )


def _rows(job: Job, devices: int) -> tuple[list[int], list[int]]:
    """Rows of the micro-batches that meet the constraints, and of those in the problem.

    They differ only with `Job.beyond`: then a refusal also names sizes that would fit but break the
    constraints on dp and micro-batches. A written schedule fixes the number of micro-batches.
    """
    traced, constraints = job.traced, job.constraints
    wanted = micro_batch_rows(traced.rows, devices, constraints, traced.least)
    if constraints.programs or not job.beyond or traced.trace.rows is not None:
        return wanted, wanted
    free = replace(constraints, dp=None, micro_batches=None, micro_batch_size=None)
    return wanted, micro_batch_rows(traced.rows, devices, free, traced.least)


def _least_stages(constraints: Constraints) -> int:
    """The stages that the constraints ask for."""
    schedule = constraints.schedule
    chunks = chunks_of(constraints, schedule) if schedule is not None else 1
    return (constraints.pp or 1) * chunks


def _usual_window(constraints: Constraints) -> int:
    """Receives posted ahead where none are asked for; those of eager-1f1b are chosen from 1 on."""
    return 1 if constraints.schedule == EAGER else arguments.WINDOW


def _kind_seconds(
    degree: Degree, sending: Sending, precision: str, rows: int, kind: GroupKind
) -> float:
    """Seconds in which a kind of tensor-parallel group runs a micro-batch."""
    graph = degree.trace.graph
    computing = whole_seconds(graph, kind.device, precision, rows)
    if kind.link is None:
        return computing
    return computing + sum(map(sum, sending(graph, rows, kind.link)))
