"""Variants of a tried model, whose results tell a wrong split from rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from benchmarks.zoo.subject import Model


def doubled(model: Model) -> Model:
    """The model in fp64, with inputs in fp64."""
    return replace(
        model,
        build=lambda: model.build().double(),
        inputs=lambda rows: tree_map(_double, model.inputs(rows)),
    )


def nudged(model: Model) -> Model:
    """The model with each weight's last place off by one, up or down."""
    return replace(model, build=lambda: _nudged(model.build()))


def _double(leaf: Any) -> Any:
    floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.double() if floats else leaf


def _nudged(built: nn.Module) -> nn.Module:
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in built.parameters():
            if weight.is_floating_point():
                up = torch.randint(2, weight.shape, generator=draws).bool()
                way = torch.where(up, torch.inf, -torch.inf).to(weight.dtype)
                weight.copy_(torch.nextafter(weight, way))
    return built
