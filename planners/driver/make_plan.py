"""`plan`: from a model and a cluster to a `Plan`.

PlanRequest     the arguments, checked
Traced          traced_model    the model's graph, its dataflow and its repeated modules
Job             measured        the devices, with the rates that the model needs
Plan            best_loss       the loss whole, or in parts (`planners.driver.loss_parts`)
                best_plan       cost, search, write, refine (`planners.driver.choose`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from autopipe.cluster.cluster import Cluster
from autopipe.errors import AutopipeError, RowsFixed
from autopipe.frontend import batch
from autopipe.frontend.least_rows import least_rows, or_two
from autopipe.frontend.loss import Loss, check_trained
from autopipe.frontend.measured_optimizer import measured_on, optimizer_factor
from autopipe.frontend.optimizer import MakeOptimizer
from autopipe.frontend.row_length import at_length
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.planfile.contents import BATCH, ROWS, Plan, signed
from autopipe.planfile.parts import InputSpec
from autopipe.planners.costs.precision_of import need
from autopipe.planners.costs.tp_degrees import check_degree
from autopipe.planners.driver import against_eager, against_whole, arguments, precisions
from autopipe.planners.driver.arguments import examples, second
from autopipe.planners.driver.loss_parts import best_loss
from autopipe.planners.driver.request import (
    Job,
    PlanRequest,
    Traced,
    as_optimizer_allows,
    left_alone,
)
from autopipe.planners.model.problem import Constraints
from autopipe.rows import loss_grouping, moved_states, own_backwards, row_mixing
from autopipe.rows.one_row import same_with_one_row
from autopipe.stages.bind import check_runs
from autopipe.stages.loss_cut import cut_loss
from autopipe.tracing.source import Source, bare, keeping_default_dtype, trace_source
from autopipe.tracing.symbolic_sequence import shorter
from autopipe.tracing.trace import Trace
from autopipe.util.gc_pause import resting
from autopipe.util.progress import Say, phase
from autopipe.util.stopwatch import Stopwatch


@resting()
@keeping_default_dtype()
def plan(
    model: Source,
    inputs: Any,
    *,
    loss: Loss | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    precision: str | None = None,
    grad_dtype: str | None = None,
    optimizer_dtype: str | None = None,
    compile: bool | None = None,
    fuse_attention: bool | None = None,
    cluster: str | Path | Cluster | None = None,
    batch_size: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    tp: int | None = None,
    micro_batches: int | None = None,
    micro_batch_size: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    window: int | None = None,
    depth: int | None = None,
    memory: int | str | Sequence[int | str] | None = None,
    zero: int | None = None,
    transfers: str | None = None,
    turns: str | Sequence[int] | None = None,
    recompute: str | Sequence[str] | None = None,
    offload: str | Sequence[str] | None = None,
    planner: str = "dynamic",
    sequence_parallel: bool = True,
    loss_over: str = ROWS,
    loss_parts: int | str | None = None,
    lengths: Sequence[int] = (),
    source: str | None = None,
    say: Say | None = None,
    watch: Stopwatch | None = None,
) -> Plan:
    """Decide how to split a model over a cluster.

    No process is started, except to measure this machine.

    Args:
        model: the model, or the function that builds it; its weights are never allocated.
        inputs: an example batch, or `inputs(batch_size)`: a tuple for `model(*batch)` or a dict
            for `model(**batch)`. What `forward` does not take is the loss's.
        loss: `loss(outputs, batch)`, a scalar tensor or `SumCount`; default: a scalar output, an
            output's `.loss`, or the first of a tuple.
        optimizer: a name in torch.optim, or a function of parameters or of `named_parameters`.
        precision: "fp32"; "bf16" or "fp16": parameters and activations are of 16 bits, with fp32
            master weights, gradients and optimizer state; "bf16-autocast" or "fp16-autocast": only
            the matrix products that torch.autocast chooses. None: on GPUs that all have it, for a
            model whose parameters are of fp32, the first of "bf16", "bf16-autocast" and "fp32" in
            which the model can be planned; else "fp32".
        grad_dtype: in which "bf16" or "fp16" sums gradients over micro-batches and replicas: "fp32"
            or its own; the optimizer gets them in fp32. None: as `optimizer_dtype`.
        optimizer_dtype: "fp32", the default: parameters have master weights; or the precision's
            own: the optimizer changes parameters of 16 bits, and its state is of 16 bits too.
        compile: whether stages run through torch.compile: memory-bound ops are fused, and forward
            keeps only what products of matrices and attention need. None: on GPUs, unless the model
            has an op that cannot be compiled.
        fuse_attention: whether attentions that the model writes out become one op each, which
            computes the same to rounding (`rewriting.fused_attention`). None: in compiled stages.
        cluster: "local:4", "cpu:4", "2x8xA100-80GB", a file, a `Cluster`; default: this machine.
        batch_size: rows of the whole batch; default: the example's, or 8 a device.
        pp, dp, tp, micro_batches: constraints; None leaves them to the planner.
        micro_batch_size: rows of a micro-batch, instead of `micro_batches`.
        schedule: one of `schedules.registry.SCHEDULES`, or a file that one is written in.
        chunks: stages on each rank, for the schedule interleaved.
        window, depth: at every boundary, the receives posted ahead and, for eager-1f1b, the
            micro-batches in flight besides; None: as many as the link asks for and memory allows.
        memory: bytes a device may hold ("24GiB"), where that is less than it has; or one such
            number for each device.
        zero: 1 shards optimizer state over replicas, 2 gradients too, 3 also parameters; None:
            as much of it as memory asks for.
        transfers: with tp, how a tensor that all tensor-parallel ranks have goes to a later stage:
            "whole" from each rank, or "parts": each sends one, and the receivers gather them. None:
            the faster way to each stage.
        turns: of each stage the ranks of a pipeline that take turns at it, (1, 2) or "1,2"; "off":
            one each. None: as many as make a step faster, under 1f1b (`planfile.turns`).
        recompute: blocks to recompute in backward: "all", "none", a class of them, or paths; or of
            all others the ops "attention" (its scores, softmax and dropout), "norms",
            "activations", "elementwise" (all but products and attention) or "gathers" (of tp); or
            an op by a node's name, which means it in all blocks of a class.
            None: those that the model itself recomputes (`torch.utils.checkpoint`), or else what
            memory asks for, by block or by op.
        offload: blocks that keep what backward needs in the host's memory: "all", "off", a class
            of them, or paths; "auto": those for which that is quicker than running them again,
            where devices have a link to their host. None: as "off".
        planner: "dynamic": the fastest cuts; "exhaustive": the same, by trying all; "uniform":
            equally many blocks a stage, as Megatron-LM cuts.
        sequence_parallel: with tp, also consider shards of the batch's second dim between layers;
            they hold less, and take less time in norms and sums.
        loss_over: "rows": the loss must be one of the whole batch, however it is cut into
            micro-batches; "micro-batch": the mean of each micro-batch's own, whatever that is;
            "batch": whatever it is of all rows together, as in-batch negatives are, in two passes:
            forward for what the loss reads, then forward and backward (`stages.whole_loss`).
        loss_parts: the number of parts of the vocabulary from which the loss is computed, without
            all of its logits at once; "off" leaves the loss as it is. None or "auto": in parts if
            that is faster, as it saves memory and costs products (`planners.driver.loss_parts`).
        lengths: tokens of a row that batches will have, the longest as many as in `inputs`; bytes
            and seconds are those of the longest, and the model is compared with its graph at each.
            None: a run takes rows as long as those of `inputs`, and shorter ones all the same.
        source: where the model comes from, for the plan to remember.
        say: gets one line about each fact worth telling.
        watch: gets the seconds that tracing, costing, searching and dry runs take.

    Raises:
        ModelError: the inputs do not fit the model, or (CaptureError) it cannot be captured.
        InfeasibleError: no plan fits; says the nearest one and its shortfall in bytes. Or what was
            asked for contradicts itself.
        AutopipeError: an argument cannot be met.
    """
    say, watch = say or (lambda line: None), watch or Stopwatch()
    arguments.check_words(
        precision=precision, planner=planner, loss_over=loss_over, zero=zero, transfers=transfers
    )
    schedule, programs = arguments.schedule_of(schedule, chunks)
    if programs:
        pp, micro_batches = arguments.as_written(programs, pp, micro_batches)
    parts = arguments.loss_parts_of(loss_parts)
    ranks_of_stages = arguments.turns_of(turns)
    devices = arguments.cluster_meant(cluster, (sum(ranks_of_stages or ()) or pp, dp, tp), say)
    limits = arguments.limits_of(memory, devices)
    arguments.check_host(offload, devices)
    degrees, ahead = (pp, dp, tp, micro_batches), (chunks, window, depth)
    constraints = Constraints(
        *(*degrees, schedule, limits, *ahead, zero, None, programs, transfers),
        turns=ranks_of_stages,
        micro_batch_size=micro_batch_size,
    )
    with watch("traced"):
        skeleton = bare(model, say)  # first: it may set the dtype that inputs are made in
    like = measured_on(skeleton.named_parameters())
    constraints = as_optimizer_allows(constraints, optimizer, say, like)
    usual = (
        precisions.usual_precisions(devices, skeleton, say) if precision is None else [precision]
    )
    if grad_dtype or optimizer_dtype:  # they go with that one
        usual = usual[:1]

    request = PlanRequest(
        model=model,
        inputs=inputs,
        loss=loss,
        optimizer=optimizer,
        **precisions.dtypes_of(usual[0], grad_dtype, optimizer_dtype),
        compiled=compile,
        fuse_attention=fuse_attention,
        cluster=devices,
        batch_size=batch_size,
        constraints=constraints,
        recompute=recompute,
        offload=offload,
        planner=planner,
        sequence_parallel=sequence_parallel,
        loss_over=loss_over,
        loss_parts=parts,
        lengths=arguments.lengths_of(inputs, lengths),
        source=source,
    )

    def planned(precision: str) -> Plan:
        dtypes = precisions.dtypes_of(precision, grad_dtype, optimizer_dtype)
        return _planned(replace(request, **dtypes), skeleton, say, watch)

    return signed(precisions.in_the_first(usual, planned, say))


def _planned(request: PlanRequest, skeleton: nn.Module, say: Say, watch: Stopwatch) -> Plan:
    """The best plan of what is asked for; the skeleton is left as it was."""
    traced = traced_model(request, skeleton, say, watch)
    if request.fuse_attention and not traced.with_fused_attention.fused_attention:
        raise AutopipeError(
            "fuse_attention was asked for, and the model writes out no attention that amounts to "
            "one op",
            hint="leave it out; docs/features.md says which stay as they are written",
        )
    needed = need(traced.graph, request.precision)
    if request.may_fuse:
        needed |= need(traced.with_fused_attention.graph, request.precision)
    devices = arguments.measured(request.cluster, needed, say)
    with left_alone(request.optimizer):
        factor = optimizer_factor(request.optimizer, traced.graph)
    best = best_loss(Job(request, traced, devices, factor), watch, say)
    for line in traced.if_cut if best.mesh.dp * best.batch.micro_batches > 1 else ():
        say(line)
    check_runs(best)
    return best


def traced_model(request: PlanRequest, skeleton: nn.Module, say: Say, watch: Stopwatch) -> Traced:
    """The model as a graph, with what the user's code says of rows and of recomputation.

    Args:
        skeleton: the model with fake parameters.

    Raises:
        ModelError: the inputs do not fit the model, or (CaptureError) it cannot be captured.
        InfeasibleError: the heads of an attention do not divide by the tensor-parallel degree.
    """
    inputs, constraints = request.inputs, request.constraints
    example, specs = arguments.example_of(inputs)
    devices = request.cluster.num_devices
    rows = request.batch_size or arguments.rows_of(inputs, example, specs, devices)
    with watch("traced"), phase("tracing"):
        trace = _traced(request, skeleton, example, specs, rows, say)
        check_trained(trace.graph)
        for line in trace.facts(gpus=arguments.on_gpus(request.cluster)):
            say(line)
        if constraints.tp is not None:
            check_degree(trace.graph, constraints.tp, devices)
        against_eager.check(request, skeleton, trace, example, say)
        against_eager.check_at_lengths(request, skeleton, trace, example, say)
        batch_of = examples(inputs, example, specs)
        whole_loss, fingerprinted, if_cut = None, trace.graph, tuple[str, ...]()
        if min(rows, (constraints.dp or 2) * (constraints.micro_batches or 2)) > 1:
            fewer = partial(_of_fewer_tokens, request, example, specs)
            loss_grouping.check(trace, batch_of, request.loss, request.loss_over, say, fewer)
            mixing = row_mixing.remark(trace, batch_of)
            others = (of.remark(trace.graph) for of in (moved_states, own_backwards))
            if_cut = tuple(line for line in (mixing, *others) if line)
        if request.loss_over == BATCH:
            whole_loss = cut_loss(trace.graph)
            against_whole.check(request, skeleton, trace, whole_loss, batch_of, say)
            trace = replace(trace, graph=whole_loss.rows)
        flow, blocks = analyse(trace.graph), find_blocks(trace.graph)
    least = or_two(least_rows(trace.graph), trace.asks_for_one_row)
    for name, module in skeleton.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            say(f"{name}: its gradients are sparse in one process, and dense in a plan")
    recompute, offload = request.recomputed(flow, blocks, say), request.offloaded(blocks)
    traced = Traced(trace, flow, blocks, rows, least, recompute, fingerprinted)
    traced = replace(traced, whole=whole_loss, offload=offload, if_cut=if_cut)
    say(f"traced: {traced}")
    return traced


def _of_fewer_tokens(
    request: PlanRequest, example: Any, specs: Sequence[InputSpec], tokens: int
) -> loss_grouping.Short:
    """The model traced for rows of so many tokens, and what makes a batch of them."""

    def batch_of(rows: int) -> Any:
        return shorter(examples(request.inputs, example, specs)(rows), specs, tokens)

    loss, kept, short = request.loss, request.sixteen_bits, at_length(specs, tokens)
    return trace_source(request.model, batch_of(2), short, loss, kept=kept), batch_of


def _traced(
    request: PlanRequest,
    skeleton: nn.Module,
    example: Any,
    specs: Sequence[InputSpec],
    rows: int,
    say: Say,
) -> Trace:
    """The trace for any number of rows; for one number, if the model fixes it and the request
    gives it.

    Where it does not, the lines that fix it may run as they are, though nothing cuts them then.
    """
    at = partial(trace_source, request.model, specs=specs, loss=request.loss, skeleton=skeleton)
    at = partial(at, kept=request.sixteen_bits, say=say)
    others = partial(second, request.inputs, example, specs)
    size = request.microbatch_rows(rows)

    def alone(size: int) -> Trace:
        more = examples(request.inputs, example, specs)(size)
        return at(batch.some_rows(more, specs, size), symbolic=False)

    try:
        found = at(batch.two_rows(example, specs), others=others, lines_may_fix_rows=size is None)
        if found.asks_for_one_row and same_with_one_row(found.graph, partial(alone, 1)):
            return replace(found, asks_for_one_row=())
        if size != 1 or not found.asks_for_one_row:
            return found
        place = found.asks_for_one_row[0]
    except RowsFixed as refusal:
        if size is None:
            raise RowsFixed(
                refusal.message,
                hint=f"{refusal.hint}; or say how many rows a micro-batch has "
                '(--micro-batch-size) and that its loss is its own (loss_over = "micro-batch"): '
                "the graph is then one of so many",
            ) from refusal
        place = refusal.message.partition(": ")[0]
    number = "1 row" if size == 1 else f"{size} rows"
    say(f"{place}: rows are fixed here; the graph is one of micro-batches of {number} alone")
    return alone(size)
