"""Column-parallel layers as one op: what it computes, what it sends, and when."""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopipe import collectives
from autopipe.collectives import Planned
from autopipe.columns import COLUMNS, columns
from autopipe.dataflow import analyse
from autopipe.graph import Graph
from autopipe.shard import shard_graph
from autopipe.sharding import shard
from tests.simulated import Meeting, axis, everywhere
from tests.staged import traced

TP = collectives.TENSOR_PARALLEL


def layers() -> tuple[Tensor, list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    double = torch.float64
    x = torch.randn(2, 3, 4, dtype=double)
    weights = [torch.randn(6, 4, dtype=double), torch.randn(2, 4, dtype=double)]
    return x, weights, [torch.randn(6, dtype=double), torch.randn(2, dtype=double)]


def gradients(x: Tensor, weights: list[Tensor], biases: list[Tensor], made: Any) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, *weights, *biases)]
    count = len(weights)
    results = made(leaves[0], leaves[1 : 1 + count], leaves[1 + count :])
    loss = sum((n + 1) * result.tanh().sum() for n, result in enumerate(results))
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, leaves))


def test_two_ranks_compute_what_one_does() -> None:
    """Rows of each weight are dealt out; the input's gradient is whole on both ranks."""
    x, weights, biases = layers()
    linear = torch.nn.functional.linear
    expected = gradients(
        x, weights, biases, lambda x, ws, bs: [linear(x, w, b) for w, b in zip(ws, bs, strict=True)]
    )

    def rank(number: int) -> list[Tensor]:
        own = [[t.chunk(2)[number] for t in side] for side in (weights, biases)]
        return gradients(x, *own, lambda x, ws, bs: columns(x, ws, bs, TP))

    found = everywhere(Meeting(2), rank)
    for of_x, *_ in found:
        assert torch.allclose(of_x, expected[0], rtol=1e-12)
    for position in range(1, 5):
        both = torch.cat([gradients[position] for gradients in found])
        assert torch.allclose(both, expected[position], rtol=1e-12)


def test_backward_sends_before_it_makes_the_gradients_of_weights() -> None:
    """And waits last: in the joint graph, which zero-bubble schedules cut, as in eager backward."""
    x, weights, biases = layers()

    def step(x: Tensor, *parameters: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, *parameters)]
        made = columns(leaves[0], leaves[1:3], leaves[3:], TP)
        return list(torch.autograd.grad([m.sum() for m in made], leaves))

    with collectives.bind(TP, Planned(2, 0)):
        graph = make_fx(step, tracing_mode="fake")(x, *weights, *biases).graph
    ops = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    begin, finish = (
        ops.index(f"autopipe.{op}.default") for op in ("begin_input_gradient", "finish_")
    )
    products = [n for n, op in enumerate(ops) if op == "aten.mm.default"]
    assert len(products) == 2 and all(begin < product < finish for product in products)


def fused(name: str) -> Graph:
    flow = analyse(traced(name).graph)
    return shard_graph(flow, shard(flow, (), axis(2), 2), 0)


def test_layers_that_share_an_input_are_one_node() -> None:
    """q, k, v are, and the gate with its twin; a layer by itself is one as well."""
    of_block = [
        len(node.outputs)
        for node in fused("llama").nodes
        if node.op == COLUMNS and "model.layers.1" in node.scopes
    ]
    assert of_block == [3, 2]
    graph = fused("gpt")
    assert [len(node.outputs) for node in graph.nodes if node.op == COLUMNS].count(1) == 2 * 4 + 1
    assert not any(  # a conversion that is still there has another user than such layers
        node.op == "aten.linear.default" and str(node.args[0]).endswith(">R")
        for node in graph.nodes
    )
