"""Cut the loss off a graph that compares rows, so that it is computed once, over the whole batch.

    traced     batch ----------------> e [b, d] --tail--> loss
    rows       batch, gradient.0 ----> e [b, d],  sum(e * gradient.0)       for each micro-batch
    loss       embedding.0 [B, d] --------------tail--> loss                once, of all rows

The step makes two passes (GradCache: Gao et al., 2021, arXiv:2101.06983). The first runs `rows`
forward, without keeping anything for backward, for the embeddings e of all micro-batches. `loss`
gives the loss of the batch and its gradient by e. The second pass trains `rows`: the derivative of
sum(e * g) by e is g, bit by bit, so parameters get the gradient that they have in the whole batch.

Statistics of batch norm stay those of a micro-batch, as they are wherever a batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import (
    Graph,
    TensorSpec,
    bytes_at,
    shape_at,
)
from autopipe.ir.opaque_ops import observing
from autopipe.ir.partition import partition
from autopipe.ir.torch_private import fake_mode
from autopipe.planfile.parts import Read
from autopipe.rows.row_dims import joined, parted
from autopipe.stages.dry_run import fake_state
from autopipe.stages.lower import Lowered, lower
from autopipe.stages.precision import arithmetic, computing
from autopipe.stages.saved_storages import SavedStorages


@dataclass(frozen=True)
class Embedding:
    """A value that the loss of a batch is computed from.

    Attributes:
        path: its name among the inputs of `WholeLoss.loss`.
        gradient: the name of its gradient among the inputs of `WholeLoss.rows`; None: it has none.
        spec: its shape, as a formula in the rows, and its dtype.
        dim: the dim of its rows; None: it has none, and is the same in every micro-batch.
        groups: how often all rows come in that dim, one after another.
    """

    path: str
    gradient: str | None
    spec: TensorSpec
    dim: int | None
    groups: int

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The value of all rows, from those of micro-batches in the order of the batch."""
        return parts[0] if self.dim is None else joined(parts, self.dim, self.groups)

    def parted(self, gradient: Tensor, count: int) -> list[Tensor]:
        """The gradient of each of `count` micro-batches; what has no rows goes to the first."""
        if self.dim is None:
            return [gradient, *[torch.zeros_like(gradient)] * (count - 1)]
        parts = parted(gradient, self.dim, self.groups, count)
        return [part.contiguous() for part in parts]


@dataclass(frozen=True)
class WholeLoss:
    """A graph cut in two: what each micro-batch runs, and the loss of the whole batch.

    Attributes:
        rows: what a micro-batch runs. Its results are a scalar, whose derivatives by the
            embeddings are the inputs `Embedding.gradient`; the embeddings; and others that were
            asked for.
        loss: of all rows at once; its results are the loss, or a sum and a count.
    """

    rows: Graph
    loss: Graph
    embeddings: tuple[Embedding, ...]

    @property
    def counted(self) -> bool:
        """Whether the loss is a sum and a count."""
        return len(self.loss.outputs) == 2

    def lowered(
        self, rows: int, reads: Sequence[Read] | None, device: torch.device, precision: str
    ) -> Lowered:
        """The loss of `rows` rows as a module, whose arguments are those of `stage.inputs`.

        Args and raises: as `lower.lower`.
        """
        (stage,) = partition(analyse(self.loss), [])
        states: Mapping[str, Tensor] = {
            name: constant.to(device) for name, constant in self.loss.constants.items()
        }
        if reads is None:
            states = {name: fake_state(self.loss, name) for name in self.loss.states}
        return lower(
            self.loss,
            stage,
            (),
            states,
            reads,
            rows,
            last=True,
            device=device,
            precision=precision,
        )

    def held(self, rows: int, precision: str) -> int:
        """Bytes at the end of the loss's forward: embeddings, their gradients, what is saved.

        Args:
            rows: of the whole batch.
        """
        of_batch = {e.path: e for e in self.embeddings}
        with fake_mode():
            lowered = self.lowered(rows, None, torch.device("cpu"), precision)
            inputs = []
            for path in lowered.stage.inputs:
                spec = self.loss.inputs[path]
                tensor = torch.empty(shape_at(spec, rows), dtype=spec.dtype)
                trains = path in of_batch and of_batch[path].gradient is not None
                inputs.append(tensor.requires_grad_(trains))
            saved = SavedStorages(inputs)
            with observing(saved.keep), computing(arithmetic(precision, "cpu", [])):
                lowered.module(*inputs)
        return self.embedding_bytes(rows) + saved.most

    def embedding_bytes(self, rows: int) -> int:
        """Bytes of the embeddings of so many rows, and of their gradients."""
        return sum(
            bytes_at(e.spec, rows) * (1 if e.gradient is None else 2) for e in self.embeddings
        )
