"""Compute a loss over the batch from micro-batches, and refuse a model whose rows depend on others.

    whole    loss of 4 rows, by the traced graph                             2.07
    two      embeddings of 2 rows, and of the other 2; the loss of all 4     2.07, or it is refused

Both run on the model's own weights, where these are few (`against_eager.with_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.batch.cut import slice_rows
from autopipe.batch.tree import flatten
from autopipe.eager.assigned_buffers import buffers_of
from autopipe.errors import AutopipeError, ModelError
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse, is_random
from autopipe.ir.graph import Graph, shape_at
from autopipe.ir.partition import partition
from autopipe.planners.driver.against_eager import one_thread, with_weights
from autopipe.planners.driver.request import PlanRequest
from autopipe.stages.lower import Lowered, lower
from autopipe.stages.whole_loss import WholeLoss
from autopipe.tracing.capture.low_precision import KEPT
from autopipe.tracing.traced import Trace
from autopipe.util.progress import Say

ROWS = 4
"""Rows of the whole, in two micro-batches."""

CLOSE = 1e-4
"""How far the two losses may be off, as a share: sums of fp32 in another order."""


def check(
    request: PlanRequest,
    skeleton: nn.Module,
    traced: Trace,
    whole: WholeLoss,
    example: Callable[[int], Any],
    say: Say,
) -> None:
    """Compare the loss of a batch with that of its micro-batches' embeddings.

    Args:
        skeleton: the model with fake parameters.
        traced: the graph before its loss was cut off.
        example: makes a batch of a number of rows.
        say: receives the reason if the two are not compared.

    Raises:
        ModelError: they differ: a row's results depend on other rows of its batch.
    """
    why = _why_unlike(traced.graph)
    if why:
        say(f"loss: that of a batch is not compared with that of its micro-batches: {why}")
        return
    with torch.random.fork_rng(devices=[]), one_thread(), torch.no_grad():
        torch.manual_seed(0)
        leaves = flatten(example(ROWS))
        model = None
        if request.precision not in KEPT:
            model = with_weights(request, skeleton, traced.graph)
        if model is None:
            return
        held = {**traced.graph.constants, **buffers_of(model), **dict(model.named_parameters())}
        tensors = {name: tensor.detach().clone() for name, tensor in held.items()}
        try:
            losses = [_at_once(traced, tensors, leaves), _in_two(traced, whole, tensors, leaves)]
        except (AutopipeError, RuntimeError) as error:
            say(f"loss: that of a batch is not compared with that of its micro-batches: {error}")
            return
    if abs(losses[0] - losses[1]) > CLOSE * max(map(abs, losses)):
        raise ModelError(
            f"the loss of {ROWS} rows is {losses[0]:.6g}, and {losses[1]:.6g} where the model gets "
            "them in two micro-batches: what it makes of a row depends on the rows beside it, "
            "before its loss begins",
            hint="compare rows in the loss alone; or --micro-batches 1 --dp 1",
        )


def _why_unlike(graph: Graph) -> str:
    """Why the two losses may differ for a model that is right; empty: they may not."""
    for node in graph.nodes:
        if "batch_norm" in node.op:
            return f"{node.place}: a batch norm has the statistics of a micro-batch"
        if is_random(node):
            return f"{node.place}: each micro-batch draws its own random numbers"
    return ""


def _module(traced: Trace, graph: Graph, tensors: Mapping[str, Tensor], rows: int) -> Lowered:
    (stage,) = partition(analyse(graph), [])
    states = {name: tensors[name] for name in stage.states}
    return lower(graph, stage, find_blocks(graph), states, traced.reads, rows, last=True)


def _at_once(traced: Trace, tensors: Mapping[str, Tensor], leaves: Mapping[str, Any]) -> float:
    lowered = _module(traced, traced.graph, tensors, ROWS)
    return _mean(lowered.module(*(leaves[path].clone() for path in lowered.stage.inputs)))


def _in_two(
    traced: Trace, whole: WholeLoss, tensors: Mapping[str, Tensor], leaves: Mapping[str, Any]
) -> float:
    half = ROWS // 2
    lowered = _module(traced, whole.rows, tensors, half)
    seeds = {
        path: torch.zeros(shape_at(spec, half), dtype=spec.dtype)
        for path, spec in whole.rows.inputs.items()
        if path not in leaves
    }
    parts = []
    for first in (0, half):
        inputs = {**slice_rows(traced.inputs, leaves, first, first + half), **seeds}
        results = lowered.module(*(_tensor(inputs[path]).clone() for path in lowered.stage.inputs))
        parts.append(results[1:])
    joined = {
        e.path: e.joined(of_each)
        for e, of_each in zip(whole.embeddings, zip(*parts, strict=True), strict=True)
    }
    loss = whole.lowered(ROWS, traced.reads, torch.device("cpu"), "fp32")
    values = {**leaves, **joined}
    return _mean(loss.module(*(_tensor(values[path]) for path in loss.stage.inputs)))


def _tensor(leaf: Any) -> Tensor:
    assert isinstance(leaf, Tensor), "numbers are in the graph"
    return leaf


def _mean(made: Any) -> float:
    return float(made[0]) / (float(made[1]) if len(made) > 1 else 1.0)
