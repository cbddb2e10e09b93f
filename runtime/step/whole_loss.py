"""The loss of a whole batch, between the two passes of a step (`stages.whole_loss`).

    replica 0, last stage    embeddings of micro-batches 0, 1  --+-- all rows --> loss, gradients
    replica 1, last stage    embeddings of micro-batches 2, 3  --+   each keeps those of its own

Every rank that has the last stage computes the same loss of the same numbers; a gradient is sent to
nobody. What has no rows, such as a temperature, gets its gradient in micro-batch 0 of replica 0:
the sums over micro-batches and replicas leave it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.batch.tree import Leaf
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import Graph, Input, State, shape_at
from autopipe.runtime.parameters.part import RankPart
from autopipe.runtime.step.memory_meter import Meter
from autopipe.runtime.step.microbatches import Microbatches
from autopipe.sharding.torch_names import group_of
from autopipe.stages.bind import Split
from autopipe.stages.lower import Lowered
from autopipe.stages.precision import arithmetic, computing
from autopipe.stages.rng import stream
from autopipe.stages.whole_loss import Embedding, WholeLoss

Seeds = Mapping[str, Sequence[Tensor]]
"""By the name of an input of `WholeLoss.rows`, the gradient of each of the rank's micro-batches."""


@dataclass(frozen=True)
class LossOfStep:
    """The loss of a batch, or its sum and count; its gradients, if they were asked for."""

    results: tuple[Tensor, ...]
    seeds: Seeds


class BatchLoss:
    """Computes the loss of one split on a rank that has its last stage.

    Args:
        split: whose loss is over the whole batch.
        replicas: the ranks that have the same stage in all replicas; None: there is one replica.
    """

    def __init__(self, part: RankPart, split: Split, replicas: dist.ProcessGroup | None) -> None:
        assert split.whole is not None
        self.whole: WholeLoss = split.whole
        self._part = part
        self._reads = split.trace.reads
        self._replicas = replicas
        self._lowered: dict[int, Lowered] = {}

    def nothing(self, parts: Microbatches) -> Seeds:
        """Zeros in place of the embeddings' gradients, for the first pass, which has none yet."""
        device = self._part.device
        return {
            e.gradient: [
                torch.zeros((), dtype=e.spec.dtype, device=device).expand(
                    shape_at(e.spec, parts.rows)
                )
            ]
            * parts.count
            for e in self.whole.embeddings
            if e.gradient is not None
        }

    def as_given(self, parts: Microbatches) -> Mapping[str, Leaf]:
        """The batch as it is now, for the second pass, whatever the first one writes into it."""
        graphs = self.whole.rows, self.whole.loss
        written = {root for graph in graphs for root in analyse(graph).writers}
        return {
            path: leaf.clone() if isinstance(leaf, Tensor) and Input(path) in written else leaf
            for path, leaf in parts.leaves.items()
        }

    def score(
        self,
        parts: Microbatches,
        results: Sequence[Sequence[Tensor]],
        numbers: tuple[int, int],
        seed: float | None,
        meter: Meter | None = None,
    ) -> LossOfStep:
        """The loss of all rows of all replicas; every rank with the last stage calls it at once.

        Args:
            results: of each of the rank's micro-batches what `WholeLoss.rows` gives.
            numbers: the run's seed, and the step: what random ops of the loss draw from.
            seed: the gradient of the loss; None: none is wanted.
        """
        whole, dp = self.whole, self._part.plan.mesh.dp
        columns = zip(*[result[1 : 1 + len(whole.embeddings)] for result in results], strict=True)
        values = {
            e.path: self._of_batch(e, column).detach().requires_grad_(e.gradient is not None)
            for e, column in zip(whole.embeddings, columns, strict=True)
        }
        lowered = self._for(parts.rows * parts.count * dp)
        inputs = [
            values[path] if path in values else self._leaf(parts, path)
            for path in lowered.stage.inputs
        ]
        numerics = arithmetic(self._part.plan.precision, self._part.device, [])
        with (
            torch.set_grad_enabled(seed is not None),
            stream(*numbers, 0),
            computing(numerics),
            self._counted(inputs, lowered.rows, meter),
        ):
            scored = tuple(lowered.module(*inputs))
            seeds: Seeds = {} if seed is None else self._seeds(parts, scored, values, seed)
        return LossOfStep(tuple(result.detach() for result in scored), seeds)

    @contextmanager
    def holding(self, rows: int, meter: Meter | None) -> Iterator[None]:
        """Within, the embeddings of so many rows and their gradients are there."""
        size, last = self.whole.embedding_bytes(rows), len(self._part.split.stages) - 1
        if meter is not None:
            meter.hold(last, "activations", size)
        yield
        if meter is not None:
            meter.hold(last, "activations", -size)

    @contextmanager
    def _counted(self, inputs: Sequence[Tensor], rows: int, meter: Meter | None) -> Iterator[None]:
        """Within, what the loss of so many rows saves is counted."""
        last = len(self._part.split.stages) - 1
        with self.holding(rows, meter):
            with nullcontext() if meter is None else meter.keeping(last, inputs):
                yield

    def _for(self, rows: int) -> Lowered:
        """The loss of so many rows; made once for each number of them."""
        if rows not in self._lowered:
            part = self._part
            made = self.whole.lowered(rows, self._reads, part.device, part.plan.precision)
            self._lowered[rows] = made
        return self._lowered[rows]

    def _seeds(
        self,
        parts: Microbatches,
        results: Sequence[Tensor],
        values: Mapping[str, Tensor],
        seed: float,
    ) -> Seeds:
        """The gradients by this replica's embeddings, by micro-batch."""
        loss, *counts = results
        each = seed / float(counts[0]) if counts and float(counts[0]) else seed
        trained = [e for e in self.whole.embeddings if e.gradient is not None]
        leaves = [values[e.path] for e in trained]
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if loss.requires_grad:
            gradient = torch.full_like(loss, each)
            gradients = torch.autograd.grad(loss, leaves, gradient, allow_unused=True)
        place, mesh = self._part.place, self._part.plan.mesh
        seeds = {}
        for e, leaf, gradient_ in zip(trained, leaves, gradients, strict=True):
            of_all = torch.zeros_like(leaf) if gradient_ is None else gradient_
            seeds_of_rank = e.parted(of_all, mesh.dp)[place.dp]
            seeds[e.gradient or ""] = e.parted(seeds_of_rank, parts.count)
        return seeds

    def _of_batch(self, embedding: Embedding, parts: Sequence[Tensor]) -> Tensor:
        """An embedding of all rows of all replicas."""
        own = embedding.joined(parts)
        return own if embedding.dim is None else embedding.joined(self._gathered(own))

    def _leaf(self, parts: Microbatches, path: str) -> Tensor:
        """A leaf of the whole batch, on this rank's device."""
        leaf = parts.leaves[path]
        assert isinstance(leaf, Tensor), "numbers are in the graph"
        spec = next(spec for spec in parts.plan.inputs if spec.path == path)
        leaf = leaf.to(self._part.device)
        if not parts.sharded or spec.batch_dim is None:
            return leaf
        return torch.cat(self._gathered(leaf), spec.batch_dim)

    def _gathered(self, own: Tensor) -> list[Tensor]:
        """A tensor of each replica, in their order; they are of one shape."""
        if self._replicas is None:
            return [own]
        raw = own.contiguous().reshape(-1).view(torch.uint8)
        found = [torch.empty_like(raw) for _ in range(self._part.plan.mesh.dp)]
        dist.all_gather(found, raw, group=self._replicas)
        return [part.view(own.dtype).reshape(own.shape) for part in found]


@contextmanager
def buffers_restored(graph: Graph, states: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, forward may write to buffers; afterwards, or on an error, they are what they were."""
    written = [root.name for root in analyse(graph).writers if isinstance(root, State)]
    before = {name: states[name].clone() for name in written if name in states}
    try:
        yield
    finally:
        for name, value in before.items():
            states[name].copy_(value)


def replicas_of_last_stage(part: RankPart, backend: str) -> dist.ProcessGroup | None:
    """The group of the ranks with which this one shares the last stage; every rank calls it.

    None: the plan's loss is not over the whole batch, this rank has not the last stage, or there is
    one replica.
    """
    mesh, last = part.plan.mesh, part.placed[-1]
    if part.split.whole is None or mesh.dp == 1:
        return None
    found = None
    for tp in range(mesh.tp):
        ranks = [mesh.rank(last, dp, tp) for dp in range(mesh.dp)]
        group = group_of(ranks, backend, part.device)
        if part.place.rank in ranks:
            found = group
    return found
