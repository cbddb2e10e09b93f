"""Traces the module of an emitted stage back into fx graphs, as `lower` makes them.

Only torch.compile, ZeRO-3 and ops that run again need the graphs: torch.compile takes islands out
of a stage's code, ZeRO-3 adds gathers to it, and ops that run again need the stage's blocks. Other
runs call the module as it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from autopipe.stages.node_calls import (
    check_read,
    draw_under_autocast,
    repeated,
    saturated,
    take,
    under_autocast,
)
from autopipe.stages.precision import low
from autopipe.stages.recompute import Recomputed
from autopipe.stages.rng import draw


def graph_of(module: nn.Module) -> fx.GraphModule:
    """A stage as a GraphModule that calls one for each of its blocks.

    Raises:
        Exception: whatever fx raises for code that depends on values, or that it cannot follow.
    """
    graph = _trace(module)
    for target in dict.fromkeys(str(node.target) for node in graph.find_nodes(op="call_module")):
        block = module.get_submodule(target)
        inner = block.block if isinstance(block, Recomputed) else block
        piece: nn.Module = fx.GraphModule(inner, _trace(inner), type(inner).__name__)
        parent, _, leaf = target.rpartition(".")
        traced = Recomputed(piece, *block.statistics) if isinstance(block, Recomputed) else piece
        setattr(module.get_submodule(parent), leaf, traced)
    return fx.GraphModule(module, graph, type(module).__name__)


def _trace(module: nn.Module) -> fx.Graph:
    tracer = _Tracer(
        autowrap_functions=(
            *(check_read, under_autocast, draw_under_autocast, draw, low, repeated, saturated),
        )
    )
    with _Making(tracer):
        graph = tracer.trace(module)
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        node.target = take
    return graph


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


class _Making(TorchFunctionMode):
    """Records ops without a tensor among their arguments, which fx would otherwise run at once."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types or not isinstance(func, type(torch.ops.aten.add.Tensor)):
            return func(*args, **(kwargs or {}))
        return self._tracer.create_proxy("call_function", func, args, kwargs or {})
