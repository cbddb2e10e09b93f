"""A pipeline without processes: the stages of a traced model, run one after another by hand.

    forward     stage 0 -> stage 1 -> stage 2       crossing tensors are copied, as a send would
    backward    stage 0 <- stage 1 <- stage 2       so are their gradients; those of later stages
                                                    are added first

This is the oracle's other side: whatever the runtime does with messages must give these bits, and
these must be the bits of the unsplit model.
"""

import copy
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopipe.batch.cut import slice_rows
from autopipe.batch.description import count_rows, describe
from autopipe.batch.tree import flatten, rebuild
from autopipe.frontend.construct import fake_copy
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.ir.partition import partition
from autopipe.opaque.scripted import plain
from autopipe.stages.lower import lower
from autopipe.stages.rng import stream
from autopipe.tracing.trace import trace
from autopipe.tracing.traced import Trace
from tests.support.models import LENGTH
from tests.support.traces import kept
from tests.support.zoo import ZOO


def trace_model(model, inputs, loss=None, *, rows=(2, 3), **options):
    """Trace a real model by its skeleton. `inputs(rows)` makes a batch."""
    batch = inputs(rows[0])
    specs = describe(batch, inputs(rows[1]), *rows)
    options.setdefault("real", lambda: plain(model))
    options.setdefault("original", model)
    return trace(fake_copy(plain(model)), batch, specs, loss, **options)


def traced_at(name: str, length: int, **options) -> Trace:
    """The trace of a model of the zoo, its sequences cut to so many tokens."""
    case = ZOO[name]

    def inputs(rows):
        return {
            key: tensor[:, :length] if tensor.shape[1:] == (LENGTH,) else tensor
            for key, tensor in case.inputs(rows).items()
        }

    return trace_model(case.model(), inputs, case.loss, **options)


def traced(name: str) -> Trace:
    """The trace of a model of the zoo, made once for all tests."""
    case = ZOO[name]
    return kept(name, lambda: trace_model(case.model(), case.inputs, case.loss))


@dataclass
class Step:
    """What one step left behind: a loss per micro-batch, gradients and buffers by name."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, losses, model):
        return cls(
            [loss.detach() for loss in losses],
            {name: p.grad for name, p in model.named_parameters()},
            {name: b for name, b in model.named_buffers() if b.layout == torch.strided},
        )


def micro_batches(trace, batch, count):
    """The leaves of `count` micro-batches."""
    leaves = flatten(batch)
    rows = count_rows(trace.inputs, leaves) // count
    return [slice_rows(trace.inputs, leaves, k * rows, (k + 1) * rows) for k in range(count)]


def eager_step(case, trace, batch, count):
    """The unsplit model over the same micro-batches, gradients of the mean loss."""
    model = case.model()
    losses = []
    for leaves in micro_batches(trace, batch, count):
        loss = case.eager(model, rebuild(batch, leaves))
        losses.append(first(loss))
        losses[-1].backward(torch.ones_like(losses[-1]) / count)
    return Step.of(losses, model)


def first(loss):
    """The loss itself, of (sum, count) the sum."""
    return loss[0] if isinstance(loss, tuple) else loss


def split(trace, cuts):
    """The stages between `cuts`, given by node name or position."""
    positions = [trace.graph.index[c] if isinstance(c, str) else c for c in cuts]
    return partition(analyse(trace.graph), positions)


def lowered(trace, model: nn.Module, cuts, rows, **options):
    """The stages between `cuts` as modules that hold the tensors of `model`."""
    named = {
        **trace.graph.constants,
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
    }
    stages = split(trace, cuts)
    return [
        lower(
            trace.graph,
            stage,
            find_blocks(trace.graph),
            {name: named[name] for name in stage.states},
            trace.reads,
            rows,
            last=stage is stages[-1],
            **options,
        )
        for stage in stages
    ]


def staged_step(model, trace, batch, cuts, count, *, seeded=False, step=0):
    """The same step by the stages between `cuts`. The model itself is left as it was.

    With `seeded`, random nodes draw from the streams of (run 0, `step`, micro-batch).
    """
    model = copy.deepcopy(model)
    losses = []
    modules = None
    for k, leaves in enumerate(micro_batches(trace, batch, count)):
        if modules is None:
            modules = lowered(trace, model, cuts, count_rows(trace.inputs, leaves))
        with stream(0, step, k) if seeded else nullcontext():
            losses.append(one_micro_batch(modules, leaves, 1 / count))
    return Step.of(losses, model)


def one_micro_batch(modules, leaves, weight, watch=None):
    """Forward and backward through all stages; returns the loss.

    `watch(stage, module, arrived, inputs)` runs a stage's forward instead, to look at what it does.
    """
    made, received, results = {}, [], []
    for lowered in modules:
        stage = lowered.stage
        arrived = [sent(made[ref]) for ref, _ in stage.receives]
        inputs = [leaves[path] for path in stage.inputs]
        received.append(arrived)
        if watch is None:
            results.append(lowered.module(*arrived, *inputs))
        else:
            results.append(watch(stage, lowered.module, arrived, inputs))
        made.update(zip(stage.outgoing, results[-1], strict=False))
    loss = results[-1][0]
    returned = {}
    for lowered in reversed(modules):
        stage = lowered.stage
        if lowered is modules[-1]:
            roots, seeds = [loss], [torch.full_like(loss, weight)]
        else:
            back = [ref for ref in stage.outgoing if ref in returned]
            roots, seeds = [made[ref] for ref in back], [sum_of(returned[ref]) for ref in back]
        if roots and roots[0].requires_grad:
            torch.autograd.backward(roots, seeds)
        for (ref, _), tensor in zip(stage.receives, received[stage.index], strict=True):
            if tensor.grad is not None:  # it may have crossed only to be detached
                returned.setdefault(ref, []).append(tensor.grad)
    return loss


def sent(tensor):
    """What arrives on the other side: the values, in a dense layout."""
    copied = torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach())
    return copied.requires_grad_(tensor.requires_grad)


def sum_of(tensors):
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def differences(step: Step, other: Step, *, tolerance=0.0):
    """Names of what differs: losses and buffers in any bit, gradients by more than `tolerance`
    of their largest entry. A buffer that the first has not differs."""
    found = [
        f"loss {k}"
        for k, (a, b) in enumerate(zip(step.losses, other.losses, strict=True))
        if not torch.equal(a, b)
    ]
    found += [
        name
        for name, b in other.buffers.items()
        if name not in step.buffers or not torch.equal(step.buffers[name], b)
    ]
    for name, gradient in other.gradients.items():
        mine = step.gradients[name]
        if mine is None or gradient is None:
            same = mine is gradient
        elif tolerance:
            same = float((mine - gradient).abs().max()) <= tolerance * float(gradient.abs().max())
        else:
            same = torch.equal(mine, gradient)
        found += [] if same else [name]
    return found
