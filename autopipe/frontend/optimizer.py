"""Make an optimizer from a name or a user's function, and measure the bytes of its state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.errors import AutopipeError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

Named = tuple[str, nn.Parameter]

CUSTOM = "custom"
"""The name that a plan records for an optimizer given as a function."""


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


def takes_names(optimizer: Any) -> bool:
    """Whether a user's optimizer function takes parameters with their names."""
    parameters = inspect.signature(optimizer).parameters if callable(optimizer) else {}
    return next(iter(parameters), None) == "named_parameters"


def without_names(optimizer: Callable[[Iterable[Named]], torch.optim.Optimizer]) -> MakeOptimizer:
    """The optimizer as a function of unnamed parameters, used to measure its bytes of state."""
    return lambda parameters: optimizer((f"{n}.weight", p) for n, p in enumerate(parameters))
