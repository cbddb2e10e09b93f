"""Trace a request's model, and note what its code says of rows and of recomputation.

PlanRequest, skeleton --trace_source--> Trace --checks--> Traced

checks   against_eager    the graph computes what the model does
         loss_grouping    the loss is the same however rows are grouped into micro-batches
         remarks          what of the model, beside its loss, depends on micro-batches
         against_whole    a loss over the batch, cut off, is the same in two passes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from autopipe.batch.cut import some_rows, two_rows
from autopipe.batch.row_length import at_length
from autopipe.errors import RowsFixed
from autopipe.frontend.loss import check_trained
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.planfile.contents import BATCH, ROWS
from autopipe.planfile.parts import InputSpec
from autopipe.planners.costs.tp_degrees import check_degree
from autopipe.planners.driver import against_eager, against_whole, arguments
from autopipe.planners.driver.arguments import examples, second
from autopipe.planners.driver.request import PlanRequest, Traced
from autopipe.rows import loss_grouping, moved_states, own_backwards, row_mixing
from autopipe.rows.least_rows import least_rows, or_two
from autopipe.rows.one_row import same_with_one_row
from autopipe.stages.loss_cut import cut_loss
from autopipe.tracing.source import trace_source
from autopipe.tracing.symbolic_sequence import shorter
from autopipe.tracing.traced import Trace
from autopipe.util.progress import Say, phase
from autopipe.util.stopwatch import Stopwatch


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
        own_backwards.check(trace.graph)
        batch_of = examples(inputs, example, specs)
        whole_loss, fingerprinted, if_cut = None, trace.graph, tuple[str, ...]()
        cut = min(rows, (constraints.dp or 2) * (constraints.micro_batches or 2)) > 1
        pair = len(trace.graph.outputs) == 2 and request.loss_over == ROWS  # or a loss and a figure
        if cut or pair:
            fewer = partial(_of_fewer_tokens, request, example, specs)
            loss_grouping.check(trace, batch_of, request.loss, request.loss_over, say, fewer)
        if cut:
            if constraints.micro_batches != 1:  # else no later one runs before a backward
                moved_states.check(trace.graph)
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
    traced = Traced(
        trace=trace,
        flow=flow,
        blocks=blocks,
        rows=rows,
        least=least,
        recompute=request.recomputed(flow, blocks, say),
        offload=request.offloaded(blocks),
        fingerprinted=fingerprinted,
        whole=whole_loss,
        if_cut=if_cut,
    )
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
    traced_on = partial(
        trace_source,
        request.model,
        specs=specs,
        loss=request.loss,
        skeleton=skeleton,
        kept=request.sixteen_bits,
        say=say,
    )
    others = partial(second, request.inputs, example, specs)
    size = request.microbatch_rows(rows)  # None: the request leaves it open

    def alone(size: int) -> Trace:
        more = examples(request.inputs, example, specs)(size)
        return traced_on(some_rows(more, specs, size), symbolic=False)

    try:
        pair = two_rows(example, specs)
        found = traced_on(pair, others=others, lines_may_fix_rows=size is None)
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
