"""The dtype in which each node of a graph computes, and the device figures that this needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopipe.cluster.cluster import Device
from autopipe.cluster.measured import KERNELS, Need, kernel_in
from autopipe.ir import op_costs, op_seconds
from autopipe.ir.graph import Graph
from autopipe.stages.precision import AUTOCAST, COMPUTED_LOW


def whole_seconds(graph: Graph, device: Device, precision: str, rows: int = 1) -> float:
    """Seconds of a graph's forward and backward on a device, node after node, at some rows."""
    formulas = op_costs.costs(graph)
    both = op_seconds.seconds(formulas, rows, device, computed_in(graph, formulas, precision))
    return float(sum(way.sum() for way in both))


def need(graph: Graph, precision: str) -> Need:
    """The figures of a device from which the graph's seconds follow."""
    formulas = op_costs.costs(graph)
    names = [op_seconds.rate_name(dtype) for dtype in computed_in(graph, formulas, precision)]
    pairs = [*zip(formulas, names, strict=True)]
    dtypes = {dtype for formula, dtype in pairs if op_seconds.multiplies(formula)}
    kernels = {kernel_in(formula.kernel, dtype) for formula, dtype in pairs}
    return Need(tuple(sorted(dtypes)), tuple(sorted(kernels & {*KERNELS})))


def products(graph: Graph) -> tuple[str, ...]:
    """The dtypes of the model's own matrix products, as a plan has them."""
    products = filter(op_seconds.multiplies, op_costs.costs(graph))
    return tuple(sorted({op_seconds.rate_name(formula.dtype) for formula in products})) or ("fp32",)


def computed_in(
    graph: Graph, formulas: Sequence[op_costs.NodeCost], precision: str
) -> list[torch.dtype]:
    """The dtype in which each node computes; under autocast it may differ from the graph's.

    Autocast leaves fp64 as it is.
    """
    low = AUTOCAST.get(precision)
    return [
        formula.dtype
        if low is None or node.short not in COMPUTED_LOW or formula.dtype == torch.float64
        else low
        for node, formula in zip(graph.nodes, formulas, strict=True)
    ]
