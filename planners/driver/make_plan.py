"""`plan`: from a model and a cluster to a `Plan`.

PlanRequest     the arguments, checked
Traced          traced_model    the model's graph and its checks (`planners.driver.checked_trace`)
Job             measured        the devices, with the rates that the model needs
Plan            best_loss       the loss whole, or in parts (`planners.driver.loss_parts`)
                best_plan       cost, search, write, refine (`planners.driver.choose`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from autopipe.cluster.cluster import Cluster
from autopipe.errors import AutopipeError
from autopipe.frontend.loss import Loss
from autopipe.frontend.measured_optimizer import measured_on, optimizer_factor
from autopipe.frontend.optimizer import MakeOptimizer
from autopipe.planfile.contents import ROWS, Plan, signed
from autopipe.planners.costs.precision_of import need
from autopipe.planners.driver import arguments, precisions
from autopipe.planners.driver.checked_trace import traced_model
from autopipe.planners.driver.loss_parts import best_loss, loss_parts_of
from autopipe.planners.driver.request import (
    Job,
    PlanRequest,
    as_optimizer_allows,
    left_alone,
)
from autopipe.planners.model.problem import Constraints
from autopipe.stages.bind import check_runs
from autopipe.tracing.source import Source, bare, keeping_default_dtype
from autopipe.util.gc_pause import collector_paused
from autopipe.util.progress import Say
from autopipe.util.stopwatch import Stopwatch


@collector_paused()
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
    memory: float | str | Sequence[float | str] | None = None,
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
        chunks: stages on each rank, for the schedule interleaved, which they ask for.
        window, depth: at every boundary, the receives posted ahead and, for eager-1f1b, which a
            depth asks for, the micro-batches in flight besides; None: as many as the link asks for
            and memory allows.
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
    schedule, programs = arguments.schedule_of(schedule, chunks, depth)
    if programs:
        pp, micro_batches = arguments.as_written(programs, pp, micro_batches)
    ranks_of_stages, parts = arguments.turns_of(turns), loss_parts_of(loss_parts)
    constraints = Constraints(
        pp=pp,
        dp=dp,
        tp=tp,
        micro_batches=micro_batches,
        schedule=schedule,
        chunks=chunks,
        window=window,
        depth=depth,
        zero=zero,
        programs=programs,
        transfers=transfers,
        turns=ranks_of_stages,
        micro_batch_size=micro_batch_size,
    )
    arguments.check_numbers(constraints, batch_size)
    devices = arguments.cluster_meant(cluster, (sum(ranks_of_stages or ()) or pp, dp, tp), say)
    constraints = replace(constraints, memory=arguments.limits_of(memory, devices))
    arguments.check_host(offload, devices)
    with watch("traced"):
        skeleton = bare(model, say)  # first: it may set the dtype that inputs are made in
    like = measured_on(skeleton.named_parameters())
    constraints = as_optimizer_allows(constraints, optimizer, say, like)
    usual = [precision] if precision else precisions.usual_precisions(devices, skeleton, say)
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
