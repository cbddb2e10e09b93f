"""Plain PyTorch in 16 bits with fp32 master weights: what `precision="bf16"` is compared with."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.ir.torch_private import tree_map
from autopipe.tracing.capture.low_precision import WIDE
from tests.support.zoo import Batch, Case


class InLow(nn.Module):
    """A model whose parameters, inputs and activations are of 16 bits, and its results fp32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, given: Case) -> None:
        super().__init__()
        self.model, self.dtype, self.given = model, dtype, given

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a micro-batch."""
        case, low = self.given, self.cast(batch, torch.float32, self.dtype)
        outputs = Case(case.build, case.inputs, lambda outputs, _: outputs).eager(self.model, low)
        if case.loss is None:
            return outputs if isinstance(outputs, Tensor) else outputs.loss
        found = case.loss(self.cast(outputs, self.dtype, torch.float32), batch)
        assert isinstance(found, Tensor)
        return found

    def cast(self, tree: Any, old: torch.dtype, new: torch.dtype) -> Any:
        def one(leaf: Any) -> Any:
            return leaf.to(new) if isinstance(leaf, Tensor) and leaf.dtype == old else leaf

        return tree_map(one, tree)


@dataclass
class Step:
    """Losses of the micro-batches, and their gradients added in fp32, by parameter."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]


def step(
    case: Case,
    model: nn.Module,
    dtype: torch.dtype,
    batches: Iterable[Batch],
    scale: float = 1.0,
    summed: torch.dtype = torch.float32,
) -> Step:
    """One step of the model, whose parameters are the masters; nothing of it is changed.

    Args:
        scale: of the losses in backward.
        summed: the dtype in which gradients are added, before they are cast to fp32.
    """
    parts = [*batches]
    low = copy.deepcopy(model)
    for module in low.modules():
        if not isinstance(module, WIDE):  # and buffers stay as they are (`low_precision`)
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    runs, made = InLow(low, dtype, case), Step([], {})
    for batch in parts:
        loss = runs(batch)
        made.losses.append(loss.detach())
        loss.backward(torch.full_like(loss, scale / len(parts)))
        for name, parameter in low.named_parameters():
            if parameter.grad is not None:
                made.gradients[name] = made.gradients.get(name, 0) + parameter.grad.to(summed)
                parameter.grad = None
    made.gradients = {name: sum_.float() / scale for name, sum_ in made.gradients.items()}
    return made
