"""`plan`: from a model and a cluster to a `Plan`.

model, inputs --trace--> Graph --profile--> Problem --planner--> Decision --rehearse--> Plan
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from autopipe import asked, batches, checkpoints, grouping, sketch
from autopipe.aside import forking
from autopipe.binding import check_runs
from autopipe.blocks import Block, classes, find_blocks
from autopipe.candidate import Candidate
from autopipe.choosing import best_degree
from autopipe.cluster import Cluster, Device
from autopipe.dataflow import analyse
from autopipe.degrees import as_first, as_one_rank, check_heads, degrees, sending_seconds
from autopipe.draft import WINDOW, Draft
from autopipe.estimate import chunks_of
from autopipe.garbage import resting
from autopipe.graph import bytes_at
from autopipe.least import least_rows
from autopipe.losses import Loss
from autopipe.machine import machine_of
from autopipe.plan import LOSS_OVER, ROWS, ZERO, Plan, signed
from autopipe.planners import PLANNERS, Answer, Mesh
from autopipe.precision import PRECISIONS
from autopipe.probe import Say
from autopipe.problem import WRITTEN, Constraints, Problem
from autopipe.profile import Costing, Profiled, need, products, whole_seconds
from autopipe.progress import phase
from autopipe.recompute import blocks_to_recompute
from autopipe.schedule import Programs
from autopipe.schedules import SCHEDULES
from autopipe.source import Source, bare, keeping_default_dtype, trace_source, versions
from autopipe.stage_costs import EAGER
from autopipe.stopwatch import Stopwatch
from autopipe.teams import Kind, slowest_kind, teams
from autopipe.trace import Trace
from autopipe.units import find_units

NOTHING = "none"
"""Asks for no block to run again."""


@resting()
@forking()
@keeping_default_dtype()
def plan(
    model: Source,
    inputs: Any,
    *,
    loss: Loss | None = None,
    optimizer: str | asked.MakeOptimizer = "adamw",
    precision: str = "fp32",
    cluster: str | Path | Cluster | None = None,
    batch_size: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    tp: int | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    window: int | None = None,
    depth: int | None = None,
    memory: int | str | Sequence[int | str] | None = None,
    zero: int | None = None,
    recompute: str | Sequence[str] | None = None,
    planner: str = "dynamic",
    sequence_parallel: bool = False,
    loss_over: str = ROWS,
    source: str | None = None,
    say: Say | None = None,
    watch: Stopwatch | None = None,
) -> Plan:
    """Decide how to split a model over a cluster.

    No process is started but to probe this machine, and copies of this one that work ahead where
    there is a core for them (`autopipe.aside`).

    Args:
        model: the model, or the function that builds it; its weights are never allocated.
        inputs: an example batch, or `inputs(batch_size)`: a tuple for `model(*batch)` or a dict
            for `model(**batch)`. What `forward` does not take is the loss's.
        loss: `loss(outputs, batch)`, a scalar tensor or `SumCount`; default: a scalar output, an
            output's `.loss`, or the first of a tuple.
        optimizer: the name of one in torch.optim, or a function from parameters to one.
        precision: "fp32"; "bf16" or "fp16" for mixed precision.
        cluster: "local:4", "2x8xA100-80GB", a file, a `Cluster`; default: this machine.
        batch_size: rows of the whole batch; default: the example's, or 8 a device.
        pp, dp, tp, micro_batches: constraints; None leaves them to the planner.
        schedule: one of `schedules.SCHEDULES`, or a file that one is written in.
        chunks: stages on each rank, for the schedule interleaved.
        window, depth: at every boundary, the receives posted ahead and, for eager-1f1b, the
            micro-batches in flight besides; None: as many as the link asks for and memory allows.
        memory: bytes a device may hold ("24GiB"), where that is less than it has; or one such
            number for each device.
        zero: 1 deals out optimizer state over replicas, 3 parameters and gradients too; None: as
            much of it as memory asks for.
        recompute: blocks that run again in backward: "all", "none", a class of them, or paths;
            None: those that the model itself runs again (`torch.utils.checkpoint`), or else as few
            as memory asks for.
        planner: "dynamic", "exhaustive" or "uniform".
        sequence_parallel: with tp, also shard the batch's second dim between layers, where that
            takes less time; it holds less.
        loss_over: "rows": the loss must be one of the whole batch, however it is cut into
            micro-batches; "micro-batch": the mean of each micro-batch's own, whatever that is.
        source: where the model comes from, for the plan to remember.
        say: gets a line of talk at a time.
        watch: gets the seconds that tracing, costing, searching and writing down take.

    Raises:
        ModelError: the inputs do not fit the model, or (CaptureError) it cannot be captured.
        InfeasibleError: no plan fits; says the nearest one and its shortfall in bytes. Or what was
            asked for contradicts itself.
        AutopipeError: an argument cannot be met.
    """
    say, watch = say or (lambda line: None), watch or Stopwatch()
    asked.refuse_unknown("precision", precision, PRECISIONS)
    asked.refuse_unknown("planner", planner, sorted(PLANNERS))
    asked.refuse_unknown("loss_over", loss_over, LOSS_OVER)
    if zero is not None:
        asked.refuse_unknown("ZeRO stage", zero, ZERO)
    written: Programs = ()
    if schedule is not None and schedule not in SCHEDULES:
        written = sketch.from_file(Path(schedule))
        schedule = WRITTEN
        pp, micro_batches = asked.as_written(written, pp, micro_batches)
    meant = asked.cluster_meant(cluster, (pp, dp, tp), say)
    with watch("traced"):
        skeleton = bare(model, say)  # first: it may set the dtype that inputs are made in
    example, specs = asked.example_of(inputs)
    rows = batch_size or asked.rows_of(inputs, example, specs, meant.num_devices)
    limits = asked.limits_of(memory, meant)
    constraints = Constraints(
        pp, dp, tp, micro_batches, schedule, limits, chunks, window, depth, zero, None, written
    )

    with watch("traced"), phase("tracing"):
        two = batches.two_rows(example, specs)
        traced = trace_source(model, two, specs, loss, skeleton=skeleton)
        graph = traced.graph
        for place in dict.fromkeys(read.place for read in traced.reads if not read.checked):
            say(f"{place}: a number is read here that nothing depends on; a run does not read it")
        if tp is not None:
            check_heads(graph, tp)
        if min(rows, (dp or 2) * (micro_batches or 2)) > 1:  # else nothing is cut
            more = inputs if callable(inputs) else partial(batches.some_rows, example, specs)
            grouping.check(traced, more, loss, loss_over, say)
        flow, blocks = analyse(graph), find_blocks(graph)
    least = least_rows(graph)
    for name, module in skeleton.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            say(f"{name}: its gradients are sparse in one process, and dense in a plan")
    again = checkpoints.wanted(flow, blocks, say) if recompute is None else None
    if recompute is not None:
        words = [recompute] if isinstance(recompute, str) else recompute
        again = blocks_to_recompute(blocks, [word for word in words if word != NOTHING])
    stages = (pp or 1) * (chunks_of(constraints, schedule) if schedule is not None else 1)
    say(_summary(traced, blocks))
    machine = asked.measured(meant, need(graph, precision), say)
    factor = asked.optimizer_factor(asked.optimizer_named(optimizer))
    tried = degrees(machine, tp, graph)

    def whole_step(device: Device) -> float:
        return whole_seconds(graph, device, precision)

    def at(tp: int) -> Candidate:
        of_tp = teams(machine, tp, wanted=(pp or 1) * (dp or 1))
        wanted = asked.micro_batch_rows(rows, len(of_tp), constraints, least)
        # A refusal may speak of others.
        free = replace(constraints, dp=None, micro_batches=None)
        sizes = wanted if written else asked.micro_batch_rows(rows, len(of_tp), free, least)
        # A parameter that ZeRO-3 deals out needs its whole gradient on every tensor-parallel rank.
        zeros = (zero,) if zero is not None else ZERO if tp == 1 else ZERO[:2]
        degree = as_one_rank(
            tp,
            traced,
            flow,
            blocks,
            machine,
            wanted[0],
            slowest=slowest_kind(of_tp, whole_step),
            zero=zeros[-1],
            sequence=sequence_parallel,
        )
        sending = partial(sending_seconds, ranks=tp, precision=precision)

        def seconds(kind: Kind) -> float:
            whole, micro_batch = degree.trace.graph, wanted[0]
            computing = whole_seconds(whole, kind.device, precision, micro_batch)
            if kind.link is None:
                return computing
            return computing + sum(map(sum, sending(whole, micro_batch, kind.link)))

        devices, kinds = machine_of(machine, of_tp, limits, seconds)
        units = find_units(degree.flow, degree.blocks, at_least=stages)
        costing = Costing(
            flow=degree.flow,
            blocks=degree.blocks,
            units=units,
            machine=devices,
            kinds=kinds,
            batch=rows,
            rows=sizes,
            optimizer_factor=factor,
            window=window or (1 if schedule == EAGER else WINDOW),  # eager's are chosen from 1 on
            constraints=constraints,
            precision=precision,
            recompute=again,
            zeros=zeros,
            tp=tp,
            sending=sending,
        )

        def draft(profiled: Profiled) -> Draft:
            return Draft(
                degree,
                units,
                machine,
                rows,
                devices,
                precision=precision,
                planner=planner,
                optimizer=optimizer if isinstance(optimizer, str) else "custom",
                optimizer_factor=factor,
                reruns=profiled.reruns,
                even=profiled.even,
                constraints=constraints,
                versions=versions(model),
                source=source,
            )

        return Candidate(costing.timed, costing, draft, watch)

    def costed(tp: int) -> Candidate:
        with watch("costs"), as_first(tp):
            return at(tp)

    def searched(
        problem: Problem, rivals: Sequence[float] = (), mesh: Mesh | None = None
    ) -> Answer:
        with watch("search"):
            return PLANNERS[planner](problem, rivals, mesh)

    besides = degrees(machine, None, graph)[0] if tp is not None else ()
    made = best_degree(tried, costed, searched, watch, [other for other in besides if other != tp])
    check_runs(made)
    return signed(
        replace(made, products=products(graph), loss=loss is not None, loss_over=loss_over)
    )


def _summary(traced: Trace, blocks: Sequence[Block]) -> str:
    graph = traced.graph
    parameters = sum(
        int(bytes_at(s.spec, 1) / s.spec.dtype.itemsize)
        for s in graph.states.values()
        if s.kind == "parameter"
    )
    of = ", ".join(f"{len(paths)} of {kind}" for kind, paths in classes(tuple(blocks)).items())
    return f"traced: {len(graph.nodes)} nodes, {parameters / 1e6:.1f} M parameters" + (
        f", blocks: {of}" if of else ""
    )
