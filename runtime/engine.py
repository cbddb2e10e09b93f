"""How one stage computes: forward, and backward in two halves, with what lives between them.

    forward         y = stage(x)                keeps gradient edges of y, and x where it is a leaf
    backward_input  dx = what the stage before waits for
    backward_weight dw += the rest

The autograd engine does both halves at once in `backward_input`, as `torch.autograd.backward` must.
Between forward and backward it holds the *edges* of the outputs, not the outputs: their memory goes
as soon as they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Engine(Protocol):
    """What the executor asks of a stage."""

    def forward(self, microbatch: int, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the stage; with gradients enabled, keep what backward needs of this micro-batch."""

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of forward's arguments, given those of its results (None: it has none)."""

    def backward_weight(self, microbatch: int) -> None:
        """Add to the parameters' gradients what `backward_input` has left out."""


@dataclass
class AutogradEngine:
    """Runs a stage's module under autograd."""

    module: nn.Module
    _kept: dict[int, tuple[list[GradientEdge | None], tuple[Tensor, ...]]] = field(
        default_factory=dict
    )

    def forward(self, microbatch: int, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = self.module(*arguments)
        if torch.is_grad_enabled():
            edges = [
                get_gradient_edge(r) if isinstance(r, Tensor) and r.requires_grad else None
                for r in results
            ]
            leaves = tuple(arguments)
            self._kept[microbatch] = edges, leaves
        return results

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        edges, leaves = self._kept.pop(microbatch)
        roots = [
            (edge, gradient)
            for edge, gradient in zip(edges, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        if roots:
            torch.autograd.backward([edge for edge, _ in roots], [seed for _, seed in roots])
        return tuple(leaf.grad for leaf in leaves)

    def backward_weight(self, microbatch: int) -> None:
        """Nothing is left: autograd has done it in `backward_input`."""
