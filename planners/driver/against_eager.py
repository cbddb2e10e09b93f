"""Run the first rows through the model and through its graph, and refuse a graph that differs.

    compared                                             finds in the graph
    micro-batch 0    loss, each gradient, buffers        a lost branch, hook or custom backward
    micro-batch 1    the same, with other weights        a lost value kept from call to call
    once more        with counts of calls far ahead      a lost end of a warm-up

Both have the same weights and run on the CPU, the graph as the module that a single stage runs.
Between the two micro-batches weights move as an optimizer would move them: a kept value that
forward has computed from them is stale then. Both call the same kernels, so most results are equal
bit by bit. A model whose runs would take more than a second (`MOST_FLOPS`), or whose weights take
much memory (`MOST_BYTES`), is not run. It is refused if its second run made other calls of torch
than its first (`Trace.unsteady`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.batch.cut import two_rows
from autopipe.batch.tree import flatten
from autopipe.eager.assigned_buffers import as_before, buffers_of, put
from autopipe.eager.counts import FURTHER, Counts
from autopipe.eager.kept import caches_put_back, restoring
from autopipe.errors import AutopipeError, CaptureError
from autopipe.frontend import unwritten
from autopipe.frontend.quiet import libraries_hushed
from autopipe.frontend.refusals import on_every_rank, on_later_rows, reason
from autopipe.frontend.training_mode import put_into
from autopipe.frontend.transformers_adapter import eager_branches
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse, is_random, written_parameters
from autopipe.ir.graph import Graph, at_batch
from autopipe.ir.op_costs import costs
from autopipe.ir.partition import partition
from autopipe.ir.torch_private import is_fake
from autopipe.planfile.contents import BATCH
from autopipe.planfile.parts import InputSpec
from autopipe.planners.driver.arguments import ROWS, on_gpus, two_batches
from autopipe.planners.driver.outcomes import (
    TOLERANCE,
    Outcome,
    SameNumbers,
    Weights,
    compare,
    compare_ahead,
    gradients_of,
)
from autopipe.planners.driver.request import PlanRequest
from autopipe.stages.lower import lower
from autopipe.stages.saved_storages import naming_writes
from autopipe.tracing.capture.low_precision import KEPT, parameters_in
from autopipe.tracing.capture.program import Program
from autopipe.tracing.source import parameter_bytes
from autopipe.tracing.symbolic_sequence import AtLengths, shorter
from autopipe.tracing.traced import Trace
from autopipe.util.progress import Say, phase

MOST_FLOPS = 1e10
"""Operations of the graph's forward on these rows; all runs together are about eight of it, of a
model that counts its calls three for each of `Counts.places` besides."""

MOST_BYTES = 2**27
"""Bytes of the model's parameters."""


def check(request: PlanRequest, skeleton: nn.Module, traced: Trace, example: Any, say: Say) -> None:
    """Compare a model with its graph.

    Args:
        skeleton: the model with fake parameters.
        example: a batch that begins with the rows of the trace.
        say: receives the reason if the two could not be compared.

    Raises:
        CaptureError: they differ; names the tensor, the difference and the user's line.
        ModelError: the model cannot be trained on such a batch (`on_every_rank`).
    """
    with ExitStack() as until:
        until.enter_context(torch.random.fork_rng(devices=[]))
        until.enter_context(one_thread())
        until.enter_context(eager_branches())
        until.enter_context(libraries_hushed(heard=False))
        model = with_weights(request, skeleton, traced.graph, say)
        batches = two_batches(request.inputs, example, traced)
        outcomes = None if model is None else _outcomes(request, traced, model, batches, say)
    if outcomes:
        low = KEPT.get(request.precision, torch.float32)
        dtypes = {s.dtype for node in traced.graph.nodes for s in node.outputs if s is not None}
        tolerance = max(TOLERANCE.get(dtype, 1e-4) for dtype in {low, *dtypes})
        eager, of_graph, ahead = outcomes
        compare(traced, eager, of_graph, tolerance)
        for calls in sorted(ahead) if 0 in ahead else ():
            compare_ahead(traced, ahead[0], ahead[calls], calls)
    if traced.unsteady and not (outcomes and of_graph.losses[1:]):
        raise CaptureError(
            f"the model keeps {', '.join(traced.unsteady)} from one call to the next, and then "
            "computes something else; its graph is that of a first call",
            hint="keep it in a buffer that __init__ registers, and write that in place",
        )


def check_at_lengths(
    request: PlanRequest, skeleton: nn.Module, traced: Trace, example: Any, say: Say
) -> None:
    """Trace the model at each shorter length that was asked for, and compare the two there.

    Args:
        skeleton: the model with fake parameters.
        traced: the trace at the longest length.
        example: a batch of the longest rows.
        say: as for `check`.

    Raises:
        ModelError: the model cannot be run at a length, or its graph there differs from the model.
    """
    others = request.lengths[:-1]
    if not others:
        return
    specs = traced.inputs
    pair = two_rows(example, specs)
    traces = AtLengths(request.model, specs, pair, request.loss, request.sixteen_bits)
    with phase("tracing other lengths", of=len(others)) as done:
        for length in others:
            rows = shorter(pair, specs, length)
            trace = traces.at(length, rows)
            check(replace(request, inputs=rows), skeleton, trace, rows, say)
            done()


def _outcomes(
    request: PlanRequest, traced: Trace, model: nn.Module, batches: Sequence[Any], say: Say
) -> tuple[Outcome, Outcome, dict[int, Outcome]] | None:
    """The outcomes of model and graph on two micro-batches, and of the model far ahead."""
    kept = traced.kept
    followers = {name: model.get_parameter(name) for name in written_parameters(traced.graph)}
    with ExitStack() as until:
        until.enter_context(_as_it_was(model))
        if request.loss is not None:
            until.enter_context(restoring(request.loss))
        until.enter_context(parameters_in(model, kept))
        program = Program(model, batches[0], request.loss, traced.inputs, kept=kept, eager=True)
        before = {
            name: tensor.detach().clone()
            for known in (traced.graph.constants, _dense_buffers(model), followers)
            for name, tensor in known.items()
        }
        alike = _numbers(traced.graph)
        run = _Runnable(
            program, traced.inputs, lambda: {**_dense_buffers(model), **followers}, alike
        )
        weights = Weights(model)
        try:
            eager = _outcome(run, model, batches, weights)
        except Exception as error:  # whatever the model's own code raises
            if refused := on_every_rank(error, cpu=not on_gpus(request.cluster)):
                raise refused from error
            if not _whole_batch(request) and _fails_on_later_rows(run, model, batches):
                raise on_later_rows(error) from error
            say(f"the graph is not compared with the model, which raises {reason(error)}")
            return None
        ahead = _far_ahead(program, run, batches, weights) if traced.unsteady else {}
        try:
            return eager, _of_graph(traced, model, before, batches, weights), ahead
        except AutopipeError as error:  # a read with another value in the second micro-batch
            why = str(error).splitlines()[0]
        except Exception as error:  # of torch, or of the user's code that runs as it is
            with naming_writes(traced.graph):
                if refused := on_every_rank(error, cpu=not on_gpus(request.cluster)):
                    raise refused from error
            raise CaptureError(
                "the graph of the model fails where the model does not: "
                f"{type(error).__name__}: {error}"
            ) from error
        say(f"the graph is compared with the model in one micro-batch alone: {why}")
        return eager, _of_graph(traced, model, before, batches[:1], weights), ahead


def _whole_batch(request: PlanRequest) -> bool:
    """Whether the model or its loss gets all rows of a batch at once."""
    asked = request.constraints
    return asked.dp == asked.micro_batches == 1 or request.loss_over == BATCH


def _fails_on_later_rows(run: _Runnable, model: nn.Module, batches: Sequence[Any]) -> bool:
    """Whether the rows of the second micro-batch alone make the model fail, as those of the first
    do not, with the same weights."""
    failed = []
    for rows in batches:
        try:
            _outcome(run, model, [rows], Weights(model))
        except Exception:  # whatever the model's own code raises
            failed.append(rows)
    return len(batches) > 1 and failed == batches[1:]


def _dense_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a graph may have, each under its first name: not sparse ones, which only
    calls that run as they are read."""
    return {n: b for n, b in model.named_buffers() if b.layout == torch.strided}


def with_weights(
    request: PlanRequest, skeleton: nn.Module, graph: Graph, say: Say | None = None
) -> nn.Module | None:
    """The model with its weights; None if it is too large, has no values, or is not on the CPU.

    `say` receives a line for each parameter that `model()` does not write (`unwritten`).
    """
    flops = sum(float(at_batch(cost.forward_flops, ROWS)) for cost in costs(graph))
    if flops > MOST_FLOPS or parameter_bytes(skeleton) > MOST_BYTES:
        return None
    source = request.model
    if not isinstance(source, nn.Module):
        torch.manual_seed(0)
        source = unwritten.with_numbers(source, graph.states, say or (lambda line: None))
        unwritten.refuse_again(source, skeleton)
    tensors = [*source.parameters(), *source.buffers()]
    return None if any(is_fake(t) or t.device.type != "cpu" for t in tensors) else source


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Within, the model is in training and may change its state; it is restored at the end."""
    buffers = buffers_of(model)
    before = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    with restoring(model), caches_put_back(model):
        put_into(model, training=True)
        try:
            yield
        finally:
            put(model, buffers)
            for parameter, value in before:
                parameter.detach().copy_(value)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, kernels use one core: sums keep their order, and no kernel waits for busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Runnable:
    """A model or its graph: `run` takes a batch's tensors, `states` gives the kept tensors, and
    each micro-batch runs within `numbers()`."""

    run: Callable[..., Any]
    specs: Sequence[InputSpec]
    states: Callable[[], Mapping[str, Tensor]]
    numbers: Callable[[], AbstractContextManager[object]]


def _numbers(graph: Graph) -> Callable[[], AbstractContextManager[object]]:
    """What a model and its graph run within: the same random numbers, if it draws any."""
    return SameNumbers if any(is_random(node) for node in graph.nodes) else nullcontext


def _outcome(
    run: _Runnable, model: nn.Module, batches: Sequence[Any], weights: Weights, first: int = 0
) -> Outcome:
    """Run micro-batches, counted from `first`, each with its own weights."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    outcome = Outcome()
    for number, rows in enumerate(batches, first):
        weights.move(number, outcome.gradients[-1] if outcome.gradients else {})
        leaves = flatten(rows)
        inputs = [leaves[spec.path] for spec in run.specs if spec.dtype != "python"]
        with run.numbers():
            results = run.run(*(leaf.clone() for leaf in inputs if isinstance(leaf, Tensor)))
            results = results if isinstance(results, tuple) else (results,)
            loss = results[0]
            outcome.losses.append(
                torch.stack([part.detach().double().reshape(()) for part in results[:2]])
            )
            outcome.gradients.append(gradients_of(loss, trained) if loss.requires_grad else {})
        outcome.kept.append({name: state.detach().clone() for name, state in run.states().items()})
    return outcome


def _far_ahead(
    program: Program, run: _Runnable, batches: Sequence[Any], weights: Weights
) -> dict[int, Outcome]:
    """Outcomes of the second micro-batch after more calls, by their number: real ones up to
    `FURTHER`, else counts are set far ahead. Where the user's code fails there is no outcome."""
    model, parts = program.model, program.parts
    counts, outcomes = Counts(*parts), dict[int, Outcome]()
    frozen = [(p, p.detach().clone()) for p in model.parameters() if not p.requires_grad]

    def run_ahead(calls: int) -> None:
        for parameter, value in frozen:
            parameter.detach().copy_(value)
        with suppress(Exception):  # a table of the user's may be shorter
            outcomes[calls] = _outcome(run, model, batches[1:], weights, 1)

    with restoring(*parts):
        _outcome(run, model, batches[1:], weights, 1)
        with restoring(*parts):
            places = counts.places(lambda: run_ahead(0))
        for calls in (n for n in places if n > FURTHER):
            with restoring(*parts):
                counts.ahead(calls)
                run_ahead(calls)
        for calls in range(FURTHER + 1):
            with as_before(*parts):
                run_ahead(calls)
    return outcomes


def _of_graph(
    traced: Trace,
    model: nn.Module,
    before: Mapping[str, Tensor],
    batches: Sequence[Any],
    weights: Weights,
) -> Outcome:
    """The graph, lowered as one stage over the same weights."""
    graph, rows = traced.graph, traced.rows or ROWS
    kept = {name: tensor.clone() for name, tensor in before.items()}
    tensors = {**dict(model.named_parameters()), **kept}
    (stage,) = partition(analyse(graph), [])
    states = {name: tensors[name] for name in stage.states}
    blocks = find_blocks(graph)
    module = lower(graph, stage, blocks, states, traced.reads, rows, last=True).module
    inputs = [spec for spec in traced.inputs if spec.path in stage.inputs]
    inputs.sort(key=lambda spec: stage.inputs.index(spec.path))
    run = _Runnable(module, inputs, lambda: kept, _numbers(graph))
    return _outcome(run, model, batches, weights)
