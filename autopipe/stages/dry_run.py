"""The dry run: rehearse all stages of a partition once, forward and backward, without memory.

It gives exactly what formulas do not: the bytes that each stage keeps for backward and makes in it,
and the looks of the tensors that cross a cut (dtype, strides, whether a gradient comes back, and in
which strides). Layout is part of the result: a reduction over the same values in another layout
adds in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopipe.ir.blocks import Block
from autopipe.ir.graph import Graph, Ref, shape_at
from autopipe.ir.opaque_ops import observing
from autopipe.ir.partition import Stage
from autopipe.ir.stage_classes import kind_of
from autopipe.ir.tensors import RowMajor, Strides, dense_strides, is_row_major
from autopipe.ir.torch_private import fake_mode
from autopipe.stages.lower import lower
from autopipe.stages.node_calls import arrived
from autopipe.stages.precision import arithmetic, computing, saves_wide, wide_statistics
from autopipe.stages.read_in_backward import zeros_read
from autopipe.stages.recompute import check_recompute, within
from autopipe.stages.saved_storages import SavedStorages, naming_writes
from autopipe.util.progress import phase


@dataclass(frozen=True)
class CrossingTensor:
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
        saved: bytes that one micro-batch keeps from forward to backward, without parameters,
            buffers, the batch, received tensors, and copies in low precision.
        made: bytes held beyond `saved` at the fullest moment of a backward, by blocks that run
            again or by all that compiled graphs make (`joint.fullest_call`).

                saved   |#### args of 4 blocks ####|## rest ##|
                        |#### args of 4 blocks ####|      <- the rest is gone
                                          + |##### block 3 again #####|
                                                       |-----|  made

        momentary: bytes held beyond `saved` at the fullest moment of a forward. A branch without a
            gradient (a prediction for a mask) keeps saved tensors until its results are freed.
        stash, fresh: for split backwards, bytes held between the halves, and those of them that the
            first half has made (`joint.split_backward_layouts`); otherwise empty.
        compiled: for each stage whether its backward runs as compiled graphs; empty: none does.
    """

    boundaries: Mapping[Ref, CrossingTensor]
    saved: tuple[int, ...]
    made: tuple[int, ...]
    momentary: tuple[int, ...]
    stash: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    compiled: tuple[bool, ...] = ()

    def runs_compiled(self, stage: int) -> bool:
        """Whether a stage's backward runs as compiled graphs."""
        return bool(self.compiled) and self.compiled[stage]

    def in_turns(self, turns: Sequence[int]) -> Rehearsal:
        """The rehearsal with each stage once for each of the `turns` of ranks; empty: once."""
        if not turns:
            return self
        stages = [stage for stage, of in enumerate(turns) for _ in range(of)]

        def taken(back: Mapping[int, Strides]) -> dict[int, Strides]:
            return {entry: back[stage] for entry, stage in enumerate(stages) if stage in back}

        crossing = {r: replace(b, gradients=taken(b.gradients)) for r, b in self.boundaries.items()}
        figures = self.saved, self.made, self.momentary, self.stash, self.fresh
        sizes = (tuple(each[stage] for stage in stages) if each else () for each in figures)
        saved, made, momentary, stash, fresh = sizes
        compiled = tuple(map(self.runs_compiled, stages))
        return Rehearsal(crossing, saved, made, momentary, stash, fresh, compiled)


def rehearse(
    graph: Graph,
    stages: Sequence[Stage],
    blocks: Sequence[Block],
    rows: int,
    *,
    gradients: bool = True,
    recompute: Collection[str] = (),
    precision: str = "fp32",
    known: Known | None = None,
) -> Rehearsal:
    """Run the stages under fake tensors with micro-batches of `rows` rows.

    Args:
        gradients: False for an evaluation graph: forward alone, nothing is kept.
        recompute: paths of the blocks that run again in backward, of all stages.
        precision: the dtype of matrix products.
        known: results of earlier rehearsals of this graph; this one's are added.

    Raises:
        PlanError: a block to recompute would not do the same again.
    """
    known = {} if known is None else known
    run = partial(_Rehearsing, graph, stages, blocks, rows, gradients, recompute, precision)
    found, unused = run(known, frozenset()).run()
    if unused:
        found = run(known, unused).run()[0]
    crossing = found.boundaries.values()
    if all(is_row_major(b.shape, b.strides, *b.gradients.values()) for b in crossing):
        return found
    # Fake kernels transpose some gradients that real kernels might lay out otherwise.
    return run(known.setdefault(RowMajor, {}), unused, RowMajor).run()[0]


Arrival = tuple[Ref, int]
"""A crossing tensor in one of the stages that receive it."""

Known = dict[Hashable, Any]
"""What has been learnt of kinds of stages (`kinds`), for rehearsals of one graph to share."""


@dataclass(frozen=True)
class _Forward:
    """The forward of a kind of stage: the look of each outgoing tensor."""

    made: tuple[tuple[CrossingTensor, bool], ...]
    saved: int
    momentary: int


@dataclass(frozen=True)
class _Live:
    """A forward that has been run, before its only backward."""

    gradients: tuple[list[Tensor], ...]
    results: tuple[Tensor, ...]
    loss: Tensor | None
    kept: SavedStorages


@dataclass
class _Rehearsing:
    """One rehearsal; `unused` are arrivals to which no gradient flows back.

    They are known only after the backward, since a stage may detach a tensor that it receives. Once
    they are known, ops that lead only to them save nothing, as in the whole model.

    A stage of a kind that has been run, on tensors that look the same, is not run again.
    """

    graph: Graph
    stages: Sequence[Stage]
    blocks: Sequence[Block]
    rows: int
    gradients: bool
    recompute: Collection[str]
    precision: str
    known: Known
    unused: frozenset[Arrival]
    layouts: Callable[[], AbstractContextManager[object]] = nullcontext
    boundaries: dict[Ref, CrossingTensor] = field(default_factory=dict)
    live: dict[Hashable, _Live] = field(default_factory=dict)

    def run(self) -> tuple[Rehearsal, frozenset[Arrival]]:
        """The rehearsal, and the arrivals to which no gradient flowed back."""
        with (
            fake_mode(),
            self.layouts(),
            wide_statistics(saves_wide(self.graph.nodes, self.precision)),
            torch.set_grad_enabled(self.gradients),
            phase("rehearsing stages", of=len(self.stages)) as done,
        ):
            kinds = [self._kind(stage) for stage in self.stages]
            keys: list[Hashable] = []
            forwards: list[_Forward] = []
            for stage, kind in zip(self.stages, kinds, strict=True):
                keys.append((kind, self._received(stage)))
                forwards.append(self._forward(stage, keys[-1]))
                done()
                for ref, (boundary, carries) in zip(stage.outgoing, forwards[-1].made, strict=True):
                    takers = [
                        to
                        for value, to in stage.sends
                        if value == ref and carries and (ref, to) not in self.unused
                    ]
                    strides = dict.fromkeys(takers, boundary.strides)
                    self.boundaries[ref] = replace(boundary, gradients=strides)
            unused, made = self.unused, [0] * len(self.stages)
            if self.gradients:
                unused, made = self._backwards(keys)
        found = Rehearsal(
            self.boundaries,
            tuple(forward.saved for forward in forwards),
            tuple(made),
            tuple(forward.momentary for forward in forwards),
        )
        return found, unused

    def _kind(self, stage: Stage) -> Hashable:
        again = within(self.graph, stage, self.blocks, self.recompute)
        check_recompute(self.graph, stage, self.blocks, again)
        kind = kind_of(self.graph, stage, self.blocks, again, last=self._is_last(stage))
        return kind, self.rows, self.gradients, self.precision

    def _is_last(self, stage: Stage) -> bool:
        return stage.index == len(self.stages) - 1

    def _received(self, stage: Stage) -> Hashable:
        """The looks of the tensors that a stage receives."""
        found = ((self.boundaries[ref], stage.index) for ref, _ in stage.receives)
        return tuple((b.shape, b.strides, b.dtype, to in b.gradients) for b, to in found)

    def _forward(self, stage: Stage, key: Hashable) -> _Forward:
        if key not in self.known:
            self.known[key], self.live[key] = self._run(stage)
        found: _Forward = self.known[key]
        return found

    def _run(self, stage: Stage) -> tuple[_Forward, _Live]:
        graph, rows, last = self.graph, self.rows, self._is_last(stage)
        states = {name: fake_state(graph, name) for name in stage.states}
        again = within(self.graph, stage, self.blocks, self.recompute)
        lowered = lower(
            graph, stage, self.blocks, states, None, rows,
            last=last, recompute=again, precision=self.precision,
        )  # fmt: skip
        numerics = arithmetic(self.precision, "cpu", [states[name] for name in lowered.low])
        copies = numerics.copies.values()
        received = [_arrival(self.boundaries[ref], stage.index) for ref, _ in stage.receives]
        inputs = [
            torch.empty(shape_at(graph.inputs[path], rows), dtype=graph.inputs[path].dtype)
            for path in stage.inputs
        ]
        saved = SavedStorages((*states.values(), *received, *inputs, *copies))
        arrivals = [arrived(tensor) for tensor in received]
        with observing(saved.keep, saved.taken), computing(numerics):
            results = lowered.module(*(tensor for tensor, _ in arrivals), *inputs)
        outgoing = tuple(results[: len(stage.outgoing)])
        # What only a branch without a gradient had saved is gone by now: the scores that groups of
        # experts are picked by, say.
        forward = _Forward(
            tuple(
                (CrossingTensor(tuple(t.shape), dense_strides(t), t.dtype, {}), t.requires_grad)
                for t in outgoing
            ),
            saved.now,
            saved.most - saved.now,
        )
        loss = results[len(outgoing)] if last else None
        return forward, _Live(tuple(gradients for _, gradients in arrivals), outgoing, loss, saved)

    def _backwards(self, keys: Sequence[Hashable]) -> tuple[frozenset[Arrival], list[int]]:
        """The backward of every stage from the last one on, to learn the strides of gradients.

        Returns the arrivals that no gradient came to, and what `Rehearsal.made` has.
        """
        unused: set[Arrival] = set()
        made = [0] * len(self.stages)
        for stage in reversed(self.stages):
            sent = tuple(self.boundaries[ref] for ref in stage.outgoing)
            seeds = tuple(
                tuple(strides for _, strides in sorted(b.gradients.items(), reverse=True))
                for b in sent
            )
            key = "backward", keys[stage.index], seeds
            if key not in self.known:
                live = self.live.pop(keys[stage.index], None) or self._run(stage)[1]
                with naming_writes(self.graph):
                    self.known[key] = _backward(live, sent)
            made[stage.index], gradients = self.known[key]
            for (ref, _), strides_now in zip(stage.receives, gradients, strict=True):
                boundary = self.boundaries[ref]
                strides = dict(boundary.gradients)
                if strides_now is not None:
                    strides[stage.index] = strides_now
                elif strides.pop(stage.index, None) is not None:
                    unused.add((ref, stage.index))
                self.boundaries[ref] = replace(boundary, gradients=strides)
        return frozenset(unused), made


def _backward(
    live: _Live, sent: Sequence[CrossingTensor]
) -> tuple[int, tuple[Strides | None, ...]]:
    """One backward: the bytes that it holds beyond `saved`, and the strides of its gradients."""
    if live.loss is not None:
        roots = [live.loss] if live.loss.requires_grad else []
        seeds = [torch.ones_like(root) for root in roots]
    else:
        carrying = [(r, b) for r, b in zip(live.results, sent, strict=True) if b.gradients]
        roots = [root for root, _ in carrying]
        seeds = [_summed(boundary) for _, boundary in carrying]
    more = 0
    if roots:
        kept = live.kept
        before = kept.most = kept.now
        with observing(kept.keep, kept.taken), zeros_read():
            torch.autograd.backward(roots, seeds)
        more = kept.most - before
    return more, tuple(dense_strides(found[0]) if found else None for found in live.gradients)


def _summed(boundary: CrossingTensor) -> Tensor:
    """The sum of a crossing tensor's gradients, later stages first, as in the runtime."""
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
    tensor = torch.empty(shape_at(state.held, 1), dtype=state.held.dtype)
    return torch.nn.Parameter(tensor, state.trainable) if state.kind == "parameter" else tensor


def _arrival(boundary: CrossingTensor, stage: int) -> Tensor:
    tensor = torch.empty_strided(boundary.shape, boundary.strides, dtype=boundary.dtype)
    return tensor.requires_grad_(stage in boundary.gradients)
