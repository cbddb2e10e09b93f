"""A rehearsal: all stages of a partition run once, forward and backward, on tensors without memory.

It gives what no formula gives exactly: the bytes each stage keeps for backward and makes again in
it, and how the tensors that cross a cut look (dtype, strides, whether a gradient comes back, and in
which strides). Layout is part of the result: a reduction over the same values in another layout
adds in another order.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from autopipe.blocks import Block
from autopipe.fake import fake_mode, storage_key
from autopipe.graph import Graph, Ref, shape_at
from autopipe.lower import lower
from autopipe.opaque import observing
from autopipe.partition import Stage
from autopipe.precision import WideStatistics, arithmetic, computing
from autopipe.recompute import within

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
    """The crossing tensors, and bytes per stage.

    Attributes:
        saved: what one micro-batch keeps from forward to backward. Parameters, buffers, the batch
            and received tensors are not among it, nor copies in low precision.
        recomputed: how much more than `saved` is held at the fullest moment of a backward, because
            blocks are run again in it: by then the blocks after them have let go of theirs.

                saved   |#### args of 4 blocks ####|## rest ##|
                        |#### args of 4 blocks ####|      <- the rest is gone
                                          + |##### block 3 again #####|
                                                       |-----|  recomputed

        low: the step's copies of parameters in low precision, all micro-batches together.
        stash, fresh: where backwards are split, what is held between the two halves, and what of it
            the first half has made (`autopipe.halves`); nothing otherwise.
    """

    boundaries: Mapping[Ref, Boundary]
    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    low: tuple[int, ...]
    stash: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()


def rehearse(
    graph: Graph,
    stages: Sequence[Stage],
    blocks: Sequence[Block],
    rows: int,
    *,
    gradients: bool = True,
    recompute: Collection[str] = (),
    precision: str = "fp32",
) -> Rehearsal:
    """Run the stages under fake tensors with micro-batches of `rows` rows.

    Args:
        gradients: False for an evaluation graph: forward alone, nothing is kept.
        recompute: paths of the blocks that run again in backward, of all stages.
        precision: what matrix products are computed in.

    Raises:
        PlanError: a block to recompute would not do the same again.
    """
    run = partial(_rehearse, graph, stages, blocks, rows, gradients, recompute, precision)
    found, unused = run(frozenset())
    return run(unused)[0] if unused else found


Arrival = tuple[Ref, int]
"""A crossing tensor in one of the stages that receive it."""


def _rehearse(
    graph: Graph,
    stages: Sequence[Stage],
    blocks: Sequence[Block],
    rows: int,
    gradients: bool,
    recompute: Collection[str],
    precision: str,
    unused: frozenset[Arrival],
) -> tuple[Rehearsal, frozenset[Arrival]]:
    """Rehearse; `unused` are arrivals to which no gradient flows back, and so is what is returned.

    They are known only after the backward: a tensor may cross to be detached. With them known, what
    leads to them alone keeps nothing for backward, as in the whole model.
    """
    boundaries: dict[Ref, Boundary] = {}
    recomputed = [0] * len(stages)
    arrivals: list[dict[Ref, Tensor]] = []
    results: list[dict[Ref, Tensor]] = []
    saved: list[int] = []
    low: list[int] = []
    kept: list[Kept] = []
    with fake_mode(), WideStatistics(), torch.set_grad_enabled(gradients):
        for stage in stages:
            states = {name: fake_state(graph, name) for name in stage.states}
            lowered = lower(
                graph,
                stage,
                blocks,
                states,
                None,
                rows,
                last=stage.index == len(stages) - 1,
                recompute=within(stage, blocks, recompute),
                precision=precision,
            )
            how = arithmetic(precision, "cpu", [states[name] for name in lowered.low])
            copies = how.copies.values()
            low.append(sum(copy.untyped_storage().nbytes() for copy in copies))
            received = {ref: _arrival(boundaries[ref], stage.index) for ref, _ in stage.receives}
            inputs = [
                torch.empty(shape_at(graph.inputs[path], rows), dtype=graph.inputs[path].dtype)
                for path in stage.inputs
            ]
            kept.append(Kept((*states.values(), *received.values(), *inputs, *copies)))
            with observing(kept[-1].keep), computing(how):
                made = lowered.module(*received.values(), *inputs)
            saved.append(sum(kept[-1].sizes.values()))
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
            unused, recomputed = _backward(stages, boundaries, arrivals, results, losses[0], kept)
    return Rehearsal(boundaries, tuple(saved), tuple(recomputed), tuple(low)), unused


def _backward(
    stages: Sequence[Stage],
    boundaries: dict[Ref, Boundary],
    arrivals: Sequence[Mapping[Ref, Tensor]],
    results: Sequence[Mapping[Ref, Tensor]],
    loss: Tensor,
    kept: Sequence[Kept],
) -> tuple[frozenset[Arrival], list[int]]:
    """The backward of every stage from the last one on, to learn the strides of gradients.

    Returns the arrivals that no gradient came to, and what `Rehearsal.recomputed` has.
    """
    unused: set[Arrival] = set()
    recomputed = [0] * len(stages)
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
            of = kept[stage.index]
            before = of.most = of.now
            with observing(of.keep):
                torch.autograd.backward(roots, seeds)
            recomputed[stage.index] = of.most - before
        for ref, tensor in arrivals[stage.index].items():
            boundary = boundaries[ref]
            strides = dict(boundary.gradients)
            if tensor.grad is not None:
                strides[stage.index] = dense_strides(tensor.grad)
            elif strides.pop(stage.index, None) is not None:
                unused.add((ref, stage.index))
            boundaries[ref] = replace(boundary, gradients=strides)
    return frozenset(unused), recomputed


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


class Kept:
    """What autograd keeps of one stage, storage by storage, as it comes and goes.

    Storages of `not_owned_by` are left out: somebody else pays for them.

    Attributes:
        sizes: bytes of every storage that was ever kept.
        now, most: bytes kept at this moment, and at the fullest since `most` was last set.
    """

    def __init__(self, not_owned_by: Iterable[Tensor]) -> None:
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0
        # Storages are held, not keys alone: one that is gone would lend its key to another.
        self._owned = {storage_key(tensor): tensor.untyped_storage() for tensor in not_owned_by}
        self._storages: list[torch.UntypedStorage] = []
        self._users: Counter[int] = Counter()

    def keep(self, tensor: Tensor) -> Tensor:
        """What autograd is to keep in the place of a tensor; it is kept as long as that lives."""
        key = storage_key(tensor)
        if key in self._owned:
            return tensor
        storage = tensor.untyped_storage()
        self._storages.append(storage)
        self.sizes[key] = storage.nbytes()
        self._users[key] += 1
        if self._users[key] == 1:
            self.now += self.sizes[key]
            self.most = max(self.most, self.now)
        held = tensor.detach()
        weakref.finalize(held, self._let_go, key)
        return held

    def _let_go(self, key: int) -> None:
        self._users[key] -= 1
        if self._users[key] == 0:
            self.now -= self.sizes[key]
