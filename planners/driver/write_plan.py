"""A planner's answer written down as a `Plan`: stages by name, exact bytes, ranks on devices.

Candidate, Answer --cut_model--> CutModel --dry_run--> StageBytes --> Plan --with_prediction--> Plan
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from autopipe.cluster.cluster import Cluster
from autopipe.errors import ScheduleError
from autopipe.frontend.optimizer import CUSTOM
from autopipe.ir import fingerprint
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import Ref
from autopipe.ir.partition import Stage, partition
from autopipe.joint.wanted import wanted
from autopipe.planfile.contents import FORMAT, Plan
from autopipe.planfile.parts import (
    Alternative,
    Batch,
    Boundary,
    Memory,
    Mesh,
    Place,
    PlannerNote,
    Prediction,
    StagePlan,
    StagePrediction,
    Transfer,
    data_parallel,
)
from autopipe.planfile.predict import with_prediction
from autopipe.planners.costs.part_seconds import with_conversions
from autopipe.planners.costs.plan_memory import (
    CutModel,
    StageBytes,
    check_fits,
    dry_run,
    with_eager_depths,
    with_memory,
)
from autopipe.planners.costs.precision_of import products, whole_seconds
from autopipe.planners.costs.tp_degrees import Degree
from autopipe.planners.driver.arguments import WINDOW
from autopipe.planners.driver.candidate import Candidate
from autopipe.planners.driver.work import with_work
from autopipe.planners.model.devices import Machine
from autopipe.planners.model.problem import EAGER, WHOLE, Again, Constraints, Decision
from autopipe.planners.search.best import Answer
from autopipe.schedules.instructions import format_programs, splits
from autopipe.schedules.registry import named
from autopipe.sharding.local_graph import blocks_of
from autopipe.sharding.plan_io import write_down
from autopipe.stages.recompute import within
from autopipe.stages.sent_parts import InParts, Parted, all_dims, with_parts
from autopipe.tracing.source import versions
from autopipe.util import dtypes

MOST_ALTERNATIVES = 8
"""Other meshes that a plan tells of, beside data parallelism alone."""


def write_plan(candidate: Candidate, answer: Answer) -> Plan:
    """The plan that an answer to a candidate's problem makes.

    Runs as the candidate's first tensor-parallel rank (`Candidate.on_first_rank`).

    Raises:
        Overflow: a rank's programs hold more than its device may.
        ScheduleError: a depth was asked for, and the schedule takes none.
    """
    job, constraints, decision = candidate.job, candidate.job.constraints, answer.decision
    plain = partition(
        candidate.degree.flow, [candidate.costing.units.starts[cut] for cut in decision.cuts]
    )
    cut = cut_model(candidate, answer, plain)
    costing = candidate.costing
    converting = with_conversions(answer.estimate, cut, costing.kinds, costing.forwards)
    answer = replace(answer, estimate=converting)
    equal, known = candidate.counted().repeats_equal, job.known[candidate.tp]
    held = dry_run(cut, repeats_equal=equal, known=known)
    plan = _without_bytes(candidate, answer, held, plain)
    limits = _limits(candidate.costing.machine, decision)
    factor = job.optimizer_factor
    if plan.schedule == EAGER and constraints.depth is None:
        plan = with_eager_depths(plan, held, limits, factor, constraints.window)
    plan = with_work(with_memory(plan, held, factor), candidate, answer)
    check_fits(plan, limits)
    return with_prediction(plan)


def cut_model(candidate: Candidate, answer: Answer, plain: Sequence[Stage]) -> CutModel:
    """The candidate's graph cut as decided.

    Args:
        plain: the stages, with all that they send as each rank has it.
    """
    decision = answer.decision
    config, degree, stages, parted = decision.config, candidate.degree, tuple(plain), None
    to = {
        s: dict[str, int]()
        for s, estimate in enumerate(answer.estimate.stages)
        if estimate.in_parts
    }
    if to:
        degree, parted = _in_parts(degree, plain, to)
        stages = partition(degree.flow, parted.cuts)
    batch = Batch(candidate.job.traced.rows, config.micro_batches)
    programs = candidate.job.constraints.programs
    halves = splits(programs) if programs else named(config.schedule).splits
    again = sorted({again for blocks in decision.recompute for again in blocks})
    recomputable = candidate.counted().recomputable
    return CutModel(
        degree=degree,
        once=stages,
        turns=config.turns,
        rows=batch.microbatch_rows(config.dp),
        recompute=tuple(_names(candidate, again)),
        precision=candidate.job.request.precision,
        wanted=wanted(
            halves,
            compiled=candidate.compiled,
            by_op=any(level != WHOLE for _, level in again),
            gathers=config.fully_sharded,
            offload={recomputable[block] for blocks in decision.offload for block in blocks},
        ),
        shards=config.dp if config.fully_sharded else 1,
        whole=candidate.job.traced.whole,
        parted=parted,
    )


def _in_parts(degree: Degree, plain: Sequence[Stage], to: InParts) -> tuple[Degree, Parted]:
    """The degree's graph with what goes in parts to these stages."""
    graph, held = degree.trace.graph, degree.dividing
    dims = all_dims(graph, plain, held, degree.tp, to)
    parted = with_parts(graph, plain, dims, held, degree.tp)
    return replace(
        degree,
        trace=replace(degree.trace, graph=parted.graph),
        flow=analyse(parted.graph),
        blocks=blocks_of(parted.graph, degree.blocks),
    ), parted


def _names(candidate: Candidate, again: Iterable[Again]) -> Iterator[str]:
    """The blocks that run again whole, and the nodes of the others that do, by name."""
    counted, nodes = candidate.counted(), candidate.degree.trace.graph.nodes
    for block, level in again:
        if level == WHOLE:
            yield counted.recomputable[block]
        else:
            yield from (nodes[position].name for position in counted.levels[block][level])


def _without_bytes(
    candidate: Candidate, answer: Answer, held: StageBytes, plain: Sequence[Stage]
) -> Plan:
    """The plan but for bytes, eager depths and its prediction."""
    job, degree, decision = candidate.job, candidate.degree, answer.decision
    request, config, uncut = job.request, decision.config, job.traced.graph
    turns = config.turns or (1,) * len(plain)
    each = [
        (planned, taken) for planned, taken in zip(plain, turns, strict=True) for _ in range(taken)
    ]
    graph = held.cut.graph
    classes, states, collectives = write_down(
        uncut, degree.whole_blocks, degree.sharding, graph, held.cut.rows
    )
    return Plan(
        format=FORMAT,
        versions=versions(request.model),
        source=request.source,
        fingerprint=fingerprint.fingerprint(job.traced.fingerprinted),
        trail=fingerprint.trail(job.traced.fingerprinted),
        inputs=degree.trace.inputs,
        reads=degree.trace.reads,
        cluster=job.cluster,
        mesh=_mesh(job.cluster, candidate.costing.machine, decision, degree.tp),
        batch=Batch(job.traced.rows, config.micro_batches),
        precision=request.precision,
        grad_dtype=request.grad_dtype,
        optimizer_dtype=request.optimizer_dtype,
        low_buffers=job.traced.trace.kept.buffers if job.traced.trace.kept else (),
        compiled=candidate.compiled,
        optimizer=request.optimizer if isinstance(request.optimizer, str) else CUSTOM,
        schedule=config.schedule,
        programs=tuple(format_programs(job.constraints.programs).splitlines()),
        boundaries=_boundaries(job.constraints, decision),
        blocks=classes,
        stages=tuple(
            replace(_stage(candidate, answer, held, planned, stage), turns=taken)
            for (planned, taken), stage in zip(each, held.cut.stages, strict=True)
        ),
        prediction=Prediction(0.0, 0.0),
        planner=_note(candidate, answer),
        states=states,
        collectives=collectives,
        products=products(uncut),
        loss=request.loss is not None,
        loss_over=request.loss_over,
        loss_parts=job.traced.loss_parts,
        fused_attention=job.traced.fused_attention,
        loss_seconds=_loss_seconds(candidate, answer),
        lengths=request.lengths,
        regions=degree.trace.regions,
        rows_fixed=degree.trace.rows is not None,
        asks_for_one_row=degree.trace.asks_for_one_row,
    )


def _loss_seconds(candidate: Candidate, answer: Answer) -> float:
    """Seconds of a loss over the whole batch, on the devices that have the last stage."""
    job, last = candidate.job, answer.estimate.stages[-1]
    whole, precision = job.traced.whole, job.request.precision
    if whole is None:
        return 0.0
    device = candidate.costing.kinds[last.kind].device
    return whole_seconds(whole.loss, device, precision, job.traced.rows)


def _note(candidate: Candidate, answer: Answer) -> PlannerNote:
    """What the planner says of its answer; limits only if one is below the devices' memory."""
    job = candidate.job
    most = max(device.memory for device in job.cluster.devices)
    # One that is as good as none stays beside others: a limit alone is that of all devices.
    limits = {min(limit, most) for limit in job.constraints.memory or ()}
    return PlannerNote(
        job.request.planner,
        answer.estimate.step_seconds,
        answer.bound_seconds,
        answer.binding,
        *_shown(answer.alternatives),
        limits=() if limits == {most} else tuple(sorted(limits)),
    )


def _shown(
    alternatives: tuple[Alternative, ...],
) -> tuple[Alternative | None, tuple[Alternative, ...]]:
    """The alternatives that the plan shows: the next best ones, and data parallelism alone."""
    if not alternatives:
        return None, ()
    next_best, *others = alternatives
    alone = data_parallel(alternatives)
    rest = [other for other in others[MOST_ALTERNATIVES:] if other == alone]
    return next_best, (*others[:MOST_ALTERNATIVES], *rest)


def _boundaries(constraints: Constraints, decision: Decision) -> tuple[Boundary, ...]:
    """Windows and depths as asked for, or the usual ones."""
    depth = constraints.depth or 0
    if decision.config.schedule != EAGER and depth:
        raise ScheduleError(
            f"depth={depth} was asked for, and {decision.config.schedule} takes none",
            hint=f"schedule={EAGER!r} does",
        )
    return (Boundary(constraints.window or WINDOW, depth),) * (decision.stages - 1)


def _limits(machine: Machine, decision: Decision) -> list[int]:
    """Bytes that each pipeline rank may hold: those of the smallest device of its group."""
    groups = machine.groups(decision.config.dp)
    return [groups[group].memory for group in decision.groups or range(decision.config.pp)]


def _stage(
    candidate: Candidate, answer: Answer, held: StageBytes, plain: Stage, stage: Stage
) -> StagePlan:
    """A stage by the names of its nodes, states and tensors; its bytes are still 0.

    Args:
        plain: the stage without conversions to parts and back.
        stage: it as it is in the plan's list.
    """
    graph, tensors = held.cut.graph, held.rehearsal.boundaries
    nodes = candidate.degree.trace.graph.nodes
    parts = {} if held.cut.parted is None else held.cut.parted.parts

    def transfer(ref: Ref, peer: int, receiver: int) -> Transfer:
        dims = graph.spec(ref).shape
        return Transfer(
            str(ref),
            tuple(dim if isinstance(dim, int) else str(dim) for dim in dims),
            dtypes.name_of(tensors[ref].dtype),
            peer,
            receiver in tensors[ref].gradients,
            parts.get(ref),
        )

    predicted = answer.estimate.stages[plain.index]
    return StagePlan(
        first=nodes[plain.first].name,
        last=nodes[plain.stop - 1].name,
        nodes=len(plain.nodes),
        parameters=tuple(n for n in stage.states if graph.states[n].kind == "parameter"),
        receives=tuple(transfer(ref, peer, stage.index) for ref, peer in stage.receives),
        sends=tuple(transfer(ref, peer, peer) for ref, peer in stage.sends),
        recompute=within(graph, stage, held.cut.degree.blocks, held.cut.recompute),
        zero=answer.decision.config.zero,
        predicted=StagePrediction(
            predicted.forward_seconds, predicted.backward_seconds, Memory(0, 0, 0, 0, 0, 0)
        ),
        offload=_offloading(stage, held.cut),
    )


def _offloading(stage: Stage, cut: CutModel) -> tuple[str, ...]:
    """The blocks of a stage that offload what they keep."""
    asked = cut.wanted.offload if cut.wanted is not None else ()
    return within(cut.graph, stage, cut.degree.blocks, asked)


def _mesh(cluster: Cluster, machine: Machine, decision: Decision, tp: int) -> Mesh:
    """Every rank's place: pipeline rank `pp` has the devices of its group, in their order."""
    config, places = decision.config, []
    for pp, group in enumerate(decision.groups or range(config.pp)):
        for part in range(config.dp * tp):
            replica, tp_rank = divmod(part, tp)
            devices = machine.means[group * config.dp + replica]
            node, local, device = cluster.device_at(devices[tp_rank])
            name = f"cuda:{local}" if device.is_gpu else "cpu"
            rank = pp * config.dp * tp + part
            places.append(Place(rank, pp, replica, tp_rank, node, local, name))
    return Mesh(config.pp, config.dp, tp, tuple(places))
