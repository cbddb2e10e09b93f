"""What emitted stage files import: the one module that they name, beside torch.

    from autopipe.runtime.emitted import States, draw, parameter

The names are public: files emitted by an earlier version go on importing them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from autopipe.ir.torch_private import share_members
from autopipe.stages.node_calls import (
    check_read,
    draw_under_autocast,
    repeated,
    saturated,
    under_autocast,
)
from autopipe.stages.precision import low
from autopipe.stages.recompute import Recomputed
from autopipe.stages.rng import draw

__all__ = [
    "Recomputed",
    "States",
    "buffer",
    "check_read",
    "detach",
    "draw",
    "draw_under_autocast",
    "low",
    "parameter",
    "repeated",
    "saturated",
    "under_autocast",
]

detach = torch.ops.aten.detach.default
"""`x` without its gradient, as for what came into `torch.no_grad()` from outside."""


def parameter(*shape: int, dtype: torch.dtype = torch.float32, trainable: bool = True) -> Tensor:
    """A parameter's place in a stage: its shape, not its values."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="cpu"), trainable)


def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The place of a buffer, or of a constant of the model's code."""
    return nn.Buffer(torch.empty(shape, dtype=dtype, device="cpu"))


class States(nn.Module):
    """Parameters, buffers and modules under the model's own names.

        States({"0": States(weight=parameter(8, 3))}, bias=parameter(8))

    Members that are no Python names are reached by brackets: `self["0"].weight`.
    """

    def __init__(
        self, members: Mapping[str, Tensor | nn.Module] | None = None, /, **named: Any
    ) -> None:
        super().__init__()
        for name, member in {**(members or {}), **named}.items():
            if isinstance(member, nn.Module):
                self.add_module(name, member)
            else:
                setattr(self, name, member)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def sharing(self, other: nn.Module) -> Self:
        """This module with all that `other` holds: another call of the same one."""
        share_members(self, other)
        return self
