"""Note the dtype and shape of every value of a lowered stage, from one run on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopipe.ir.graph import Graph, Ref, shape_at
from autopipe.ir.torch_private import fake_mode
from autopipe.stages.dry_run import CrossingTensor
from autopipe.stages.lower import Lowered, parameters_of
from autopipe.stages.precision import arithmetic, computing
from autopipe.stages.recompute import Recomputed
from autopipe.util import dtypes

SPEC = "autopipe_spec"
"""The key in an fx node's meta for its value as text, `float32[2, 12]`; of several, a list."""


def observe(
    lowered: Lowered, graph: Graph, boundaries: Mapping[Ref, CrossingTensor], precision: str
) -> None:
    """Run a stage and its blocks on fake tensors, and note dtype and shape on every node.

    Args:
        lowered: a stage lowered with fake states.
        boundaries: the layouts of the tensors that it receives.
    """
    with fake_mode(), torch.no_grad():
        low = parameters_of(lowered.module, lowered.low)
        arguments = [
            torch.empty_strided(found.shape, found.strides, dtype=found.dtype)
            for found in (boundaries[ref] for ref, _ in lowered.stage.receives)
        ]
        for spec in (graph.inputs[path] for path in lowered.stage.inputs):
            arguments.append(torch.empty(shape_at(spec, lowered.rows), dtype=spec.dtype))
        with computing(arithmetic(precision, "cpu", low)):
            _Observer(lowered.module).run(*arguments)


class _Observer(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta[SPEC] = _spec(result)
        return result

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _Observer(piece_of(self.fetch_attr(target))).run(*args)


def piece_of(module: Any) -> fx.GraphModule:
    """The module with the code of a block, recomputed or not."""
    found: Any = module.block if isinstance(module, Recomputed) else module
    assert isinstance(found, fx.GraphModule), found
    return found


def _spec(value: Any) -> Any:
    if isinstance(value, Tensor):
        return f"{dtypes.name_of(value.dtype)}{list(value.shape)}"
    return [_spec(item) for item in value] if isinstance(value, list | tuple) else None


def specs_of(code: fx.Graph) -> tuple[list[str], list[str]]:
    """The dtypes and shapes of an observed graph's arguments and results, as text."""
    results: Any = code.output_node().args[0]
    made = [r.meta[SPEC] if isinstance(r, fx.Node) else "" for r in results]
    return [node.meta[SPEC] for node in code.find_nodes(op="placeholder")], made
