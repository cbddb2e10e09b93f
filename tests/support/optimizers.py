"""Optimizers that change a parameter as a whole, all together, or at random."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Lamb(torch.optim.Optimizer):
    """Each parameter moves as far as a share of its own norm, as by You et al., 2020."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.trained():
            assert parameter.grad is not None
            ratio = parameter.norm() / parameter.grad.norm()
            parameter -= 1e-3 * ratio * parameter.grad

    def trained(self) -> list[nn.Parameter]:
        every = (p for group in self.param_groups for p in group["params"])
        return [parameter for parameter in every if parameter.grad is not None]


class Together(Lamb):
    """All parameters move by the same number, as Prodigy's do."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        norm = sum(p.grad.square().sum() for p in self.trained() if p.grad is not None)
        for parameter in self.trained():
            assert parameter.grad is not None
            parameter -= parameter.grad / norm


class Langevin(torch.optim.SGD):
    """Noise in each step (Welling and Teh, 2011)."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # SGD's has overloads
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
