"""Make an optimizer from a name in torch.optim, and measure the bytes of its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from autopipe.errors import AutopipeError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def optimizer_named(optimizer: str | MakeOptimizer) -> MakeOptimizer:
    """Find the optimizer class of this name in torch.optim; a function is returned unchanged.

    Raises:
        AutopipeError: torch.optim has no optimizer of this name.
    """
    if callable(optimizer):
        return optimizer
    names = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    if optimizer.lower() not in names:
        raise AutopipeError(
            f"torch.optim has no optimizer {optimizer!r}", hint="adamw, adam, sgd, ..."
        )
    kind = names[optimizer.lower()]
    return lambda parameters: kind(parameters)  # type: ignore[call-arg]


def optimizer_factor(make: MakeOptimizer) -> float:
    """Bytes of optimizer state per byte of parameter, measured by one step on a small parameter."""
    parameter = nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    held = sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for tensor in state.values()
        # A step counter is no part of what grows with the parameter.
        if isinstance(tensor, Tensor) and tensor.numel() > 1
    )
    return held / (parameter.numel() * parameter.element_size())
