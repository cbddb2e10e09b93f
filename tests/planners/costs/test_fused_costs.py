"""Costs of fused ops: a transformer's sublayer worked by hand."""

import pytest
import torch
from torch import nn

from autopipe.ir import op_costs
from autopipe.ir.graph import at_batch
from autopipe.planners.costs.fused_costs import fused
from tests.support.staged import trace_model

LENGTH, WIDTH, FLOAT = 4, 8, 4
TENSOR = LENGTH * WIDTH * FLOAT
"""Bytes of an activation of one row."""


class Sublayer(nn.Module):
    """x + two(gelu(one(norm(x)))), and a loss."""

    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        return (x + self.two(nn.functional.gelu(self.one(self.norm(x))))).square().mean()


@pytest.fixture(scope="module")
def graph():
    return trace_model(Sublayer(), lambda rows: (torch.zeros(rows, LENGTH, WIDTH),)).graph


def kernels(graph, segments=None):
    """Of each kernel that costs something: its first op, and bytes of one row (forward, back)."""
    found = fused(graph, op_costs.costs(graph), segments or [None] * len(graph.nodes))
    return [
        (node.short, at_batch(cost.forward_bytes, 1), at_batch(cost.backward_bytes, 1))
        for node, cost in zip(graph.nodes, found, strict=True)
        if cost.launches[0] and not cost.dims
    ]


def test_what_stands_between_two_products_is_one_kernel(graph):
    """norm; gelu; and the sum with the loss, whose square and mean move nothing of their own.

    The norm has two vectors of weights, and the last kernel's result is a scalar.
    """
    weights = 2 * WIDTH * FLOAT
    assert kernels(graph) == [
        ("layer_norm", 2 * TENSOR + weights, 3 * TENSOR + 2 * weights),
        ("gelu", 2 * TENSOR, 3 * TENSOR),
        ("add", 2 * TENSOR + FLOAT, 4 * TENSOR + FLOAT),
    ]


def test_no_kernel_spans_two_blocks(graph):
    """A cut before the square: the sum is written by one kernel and read by the next."""
    at = [node.short for node in graph.nodes].index("square")
    segments = ["a"] * at + ["b"] * (len(graph.nodes) - at)
    assert [name for name, *_ in kernels(graph, segments)] == [
        "layer_norm",
        "gelu",
        "add",
        "square",
    ]


def test_products_cost_what_they_did(graph):
    own = op_costs.costs(graph)
    made = fused(graph, own, [None] * len(graph.nodes))
    assert [cost for cost in made if cost.dims] == [cost for cost in own if cost.dims]


class Upwards(nn.Module):
    """Products whose matmul has no dims here: a transposed convolution and an einsum."""

    def __init__(self):
        super().__init__()
        self.up, self.weight = nn.ConvTranspose2d(4, 8, 2), nn.Parameter(torch.zeros(8, 8))

    def forward(self, x):
        return torch.einsum("bchw,cd->bdhw", self.up(x).relu(), self.weight).square().mean()


def test_a_product_without_dims_is_no_part_of_a_kernel():
    """Its operations were lost in one, and with them the time that they take."""
    graph = trace_model(Upwards(), lambda rows: (torch.zeros(rows, 4, 3, 3),)).graph
    own = op_costs.costs(graph)
    made = fused(graph, own, [None] * len(graph.nodes))
    assert sum(bool(cost.model_flops) for cost in own) == 2
    assert [cost.model_flops for cost in made] == [cost.model_flops for cost in own]
