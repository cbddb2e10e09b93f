"""A rehearsal: all stages of a partition run once, forward and backward, on tensors without memory.

It gives what no formula gives exactly: the bytes each stage keeps for backward, and how the tensors
that cross a cut look (strides, whether a gradient comes back, and in which strides). Layout is part
of the result: a reduction over the same values in another layout adds in another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopipe.blocks import Block
from autopipe.fake import fake_mode, storage_key
from autopipe.graph import Graph, Ref, shape_at
from autopipe.lower import lower
from autopipe.opaque import observing
from autopipe.partition import Stage

Strides = tuple[int, ...]


@dataclass(frozen=True)
class Boundary:
    """A tensor that crosses a cut, for one number of rows.

    `gradients` holds, for each stage that receives it and sends a gradient back, its strides.
    """

    shape: tuple[int, ...]
    strides: Strides
    dtype: torch.dtype
    gradients: Mapping[int, Strides]

    @property
    def bytes(self) -> int:
        """Bytes of the tensor, and of its gradient."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Rehearsal:
    """The crossing tensors, and per stage the bytes that one micro-batch keeps for backward.

    Parameters, buffers, the batch and received tensors are not among the kept bytes.
    """

    boundaries: Mapping[Ref, Boundary]
    saved: tuple[int, ...]


def rehearse(
    graph: Graph,
    stages: Sequence[Stage],
    blocks: Sequence[Block],
    rows: int,
    *,
    gradients: bool = True,
) -> Rehearsal:
    """Run the stages under fake tensors with micro-batches of `rows` rows.

    Args:
        gradients: False for an evaluation graph: forward alone, nothing is kept.
    """
    found, unused = _rehearse(graph, stages, blocks, rows, gradients, frozenset())
    if unused:
        found, _ = _rehearse(graph, stages, blocks, rows, gradients, unused)
    return found


Arrival = tuple[Ref, int]
"""A crossing tensor in one of the stages that receive it."""


def _rehearse(
    graph: Graph,
    stages: Sequence[Stage],
    blocks: Sequence[Block],
    rows: int,
    gradients: bool,
    unused: frozenset[Arrival],
) -> tuple[Rehearsal, frozenset[Arrival]]:
    """Rehearse; `unused` are arrivals to which no gradient flows back, and so is what is returned.

    They are known only after the backward: a tensor may cross to be detached. With them known, what
    leads to them alone keeps nothing for backward, as in the whole model.
    """
    boundaries: dict[Ref, Boundary] = {}
    arrivals: list[dict[Ref, Tensor]] = []
    results: list[dict[Ref, Tensor]] = []
    saved: list[int] = []
    with fake_mode(), torch.set_grad_enabled(gradients):
        for stage in stages:
            states = {name: fake_state(graph, name) for name in stage.states}
            lowered = lower(
                graph, stage, blocks, states, None, rows, last=stage.index == len(stages) - 1
            )
            received = {ref: _arrival(boundaries[ref], stage.index) for ref, _ in stage.receives}
            inputs = [
                torch.empty(shape_at(graph.inputs[path], rows), dtype=graph.inputs[path].dtype)
                for path in stage.inputs
            ]
            with keeping(not_owned_by=(*states.values(), *received.values(), *inputs)) as kept:
                made = lowered.module(*received.values(), *inputs)
            saved.append(sum(kept.values()))
            outgoing = dict(zip(stage.outgoing, made, strict=False))
            for ref, tensor in outgoing.items():
                takers = [
                    to
                    for value, to in stage.sends
                    if value == ref and tensor.requires_grad and (ref, to) not in unused
                ]
                strides = dense_strides(tensor)
                boundaries[ref] = Boundary(
                    tuple(tensor.shape), strides, tensor.dtype, dict.fromkeys(takers, strides)
                )
            arrivals.append(received)
            results.append(outgoing)
        losses = made[len(stages[-1].outgoing) :]
        if gradients:
            unused = _backward(stages, boundaries, arrivals, results, losses[0])
    return Rehearsal(boundaries, tuple(saved)), unused


def _backward(
    stages: Sequence[Stage],
    boundaries: dict[Ref, Boundary],
    arrivals: Sequence[Mapping[Ref, Tensor]],
    results: Sequence[Mapping[Ref, Tensor]],
    loss: Tensor,
) -> frozenset[Arrival]:
    """The backward of every stage from the last one on, to learn the strides of gradients.

    Returns the arrivals that no gradient came to.
    """
    unused: set[Arrival] = set()
    for stage in reversed(stages):
        if stage.index == len(stages) - 1:
            roots = [loss] if loss.requires_grad else []
            seeds = [torch.ones_like(root) for root in roots]
        else:
            roots = [r for ref, r in results[stage.index].items() if boundaries[ref].gradients]
            seeds = [
                _summed(boundaries[ref])
                for ref in results[stage.index]
                if boundaries[ref].gradients
            ]
        if roots:
            torch.autograd.backward(roots, seeds)
        for ref, tensor in arrivals[stage.index].items():
            boundary = boundaries[ref]
            strides = dict(boundary.gradients)
            if tensor.grad is not None:
                strides[stage.index] = dense_strides(tensor.grad)
            elif strides.pop(stage.index, None) is not None:
                unused.add((ref, stage.index))
            boundaries[ref] = replace(boundary, gradients=strides)
    return frozenset(unused)


def _summed(boundary: Boundary) -> Tensor:
    """The gradient of a crossing tensor: those of the later stages first, as the runtime adds."""
    takers = sorted(boundary.gradients, reverse=True)
    parts = [
        torch.empty_strided(boundary.shape, boundary.gradients[taker], dtype=boundary.dtype)
        for taker in takers
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def fake_state(graph: Graph, name: str) -> Tensor:
    """A tensor in the place of a state; made under a fake mode it has no memory."""
    state = graph.states[name]
    tensor = torch.empty(shape_at(state.spec, 1), dtype=state.spec.dtype)
    return torch.nn.Parameter(tensor, state.trainable) if state.kind == "parameter" else tensor


def _arrival(boundary: Boundary, stage: int) -> Tensor:
    tensor = torch.empty_strided(boundary.shape, boundary.strides, dtype=boundary.dtype)
    return tensor.requires_grad_(stage in boundary.gradients)


def dense_strides(tensor: Tensor) -> Strides:
    """The strides of a tensor's dense copy: its own where it has no gaps and no overlaps."""
    return torch.empty_like(tensor).stride()


@contextmanager
def keeping(*, not_owned_by: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """Collect the storages that autograd keeps for backward: their bytes, by storage.

    Those of `not_owned_by` are left out: somebody else pays for them.
    """
    owned = {storage_key(tensor) for tensor in not_owned_by}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # a storage that is gone would lend its key to another

    def pack(tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in owned:
            kept[key] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with observing(pack):
        yield kept
