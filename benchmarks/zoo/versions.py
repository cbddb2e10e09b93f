"""Variants of a tried model, whose results tell a wrong split from rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autopipe.ir.graph import Graph, Node, TensorSpec
from autopipe.planfile.parts import InputSpec
from benchmarks.zoo.subject import Model


def doubled(model: Model) -> Model:
    """The model in fp64, with inputs in fp64."""
    return replace(
        model,
        build=lambda: model.build().double(),
        inputs=lambda rows: tree_map(_double, model.inputs(rows)),
    )


def doubled_inputs(inputs: Sequence[InputSpec]) -> tuple[InputSpec, ...]:
    """Leaves of a batch with float64 for float32."""
    double = {"float32": "float64"}
    return tuple(replace(spec, dtype=double.get(spec.dtype, spec.dtype)) for spec in inputs)


def doubled_graph(graph: Graph) -> Graph:
    """The same ops with fp64 for fp32, in arguments as in results.

    Raises:
        ValueError: a part runs as the user wrote it, which chooses its own dtypes.
    """
    if graph.regions:
        raise ValueError(f"{len(graph.regions)} parts run as the user wrote them")
    return replace(
        graph,
        inputs={path: _wide(spec) for path, spec in graph.inputs.items()},
        states={name: replace(s, spec=_wide(s.spec)) for name, s in graph.states.items()},
        nodes=tuple(_wide(node) for node in graph.nodes),
        constants={name: _double(tensor) for name, tensor in graph.constants.items()},
    )


def _wide(part: Any) -> Any:
    """A node, a spec or an argument with fp64 for fp32."""
    if part is torch.float32:
        return torch.float64
    if isinstance(part, tuple):
        return tuple(map(_wide, part))
    if isinstance(part, TensorSpec):
        return replace(part, dtype=_wide(part.dtype))
    if isinstance(part, Node):
        kwargs = {key: _wide(arg) for key, arg in part.kwargs.items()}
        return replace(part, args=_wide(part.args), kwargs=kwargs, outputs=_wide(part.outputs))
    return part


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
