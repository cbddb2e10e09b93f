"""Write parts of a joint graph as modules that run without autograd.

A view becomes a reshape, which works whatever the strides of its input: some kernels return other
strides than the fake tensors had (a batch norm on a CPU of a transposed input), and a view of them
has to copy. A view that is written in place stays a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopipe.joint.joint_graph import JointGraph, storages, written
from autopipe.stages.op_tape import MADE, SEGMENT
from autopipe.stages.precision import low

_VIEW, _RESHAPE = torch.ops.aten.view.default, torch.ops.aten.reshape.default


class GraphWriter:
    """Writes parts of one joint graph; they take the states from the stage's module."""

    def __init__(self, module: nn.Module, graph: JointGraph) -> None:
        self.module = module
        self.graph = graph
        calls = (*graph.forward, *graph.backward)
        self._written = frozenset(storage for call in calls for storage in written(call))

    def forward(self, saved: Sequence[fx.Node]) -> fx.GraphModule:
        """(*arguments) -> (*results, *saved)"""
        graph = fx.Graph()
        env = {n: graph.placeholder(f"x{number}") for number, n in enumerate(self.graph.arguments)}
        return self._finish(graph, env, self.graph.forward, [*self.graph.results, *saved])

    def backward(
        self, given: Sequence[fx.Node], calls: Sequence[fx.Node], *outputs: Sequence[Any]
    ) -> fx.GraphModule:
        """([*given]) -> outputs; the code empties the list of its inputs, the last one first."""
        graph = fx.Graph()
        values = graph.placeholder("values")
        env = {node: graph.call_method("pop", (values,)) for node in reversed(given)}
        for node, popped in env.items():
            popped.meta[MADE] = node.meta[MADE]
        return self._finish(graph, env, calls, [node for part in outputs for node in part])

    def _finish(
        self,
        graph: fx.Graph,
        env: dict[fx.Node, fx.Node],
        calls: Sequence[fx.Node],
        outputs: Sequence[Any],
    ) -> fx.GraphModule:
        block: object = None

        def find(node: fx.Node) -> fx.Node:
            if node not in env:
                if node in self.graph.states:
                    env[node] = graph.get_attr(self.graph.states[node])
                elif node in self.graph.copies:
                    name, dtype = self.graph.copies[node]
                    env[node] = graph.call_function(step_copy, (graph.get_attr(name), dtype))
                    env[node].meta[SEGMENT] = block  # which is the first to read it
                else:  # one of `calls`, or a view of a state
                    env[node] = graph.node_copy(node, find)
                    if node.target is _VIEW and self._written.isdisjoint(storages([node])):
                        env[node].target = _RESHAPE
                env[node].meta[MADE] = node.meta[MADE]
            return env[node]

        for call in calls:
            block = call.meta[SEGMENT]
            find(call)
        graph.output(tuple(find(o) if isinstance(o, fx.Node) else o for o in outputs))
        return fx.GraphModule(self.module, graph)


def step_copy(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The step's copy of a parameter; if there is none, a new one for this use."""
    return low(parameter).to(dtype)
