"""Column-parallel layers as one op: what it computes, what it sends, and when."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import Graph
from autopipe.ir.partition import partition
from autopipe.planfile.placements import R, S, Sharding
from autopipe.sharding import collectives
from autopipe.sharding.collectives import Planned
from autopipe.sharding.column_linear import (
    COLUMNS,
    all_sums_finished,
    begin_input_gradient,
    columns,
    finish_,
)
from autopipe.sharding.ilp import shard
from autopipe.sharding.local_graph import blocks_of, shard_graph
from tests.support.simulated import Meeting, axis, everywhere
from tests.support.staged import trace_model, traced
from tests.support.zoo import noise

TP = collectives.TENSOR_PARALLEL


def layers(double: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=double)
    weights = [torch.randn(6, 4, dtype=double), torch.randn(2, 4, dtype=double)]
    return x, weights, [torch.randn(6, dtype=double), torch.randn(2, dtype=double)]


def gradients(x: Tensor, weights: list[Tensor], biases: list[Tensor], made: Any) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, *weights, *biases)]
    count = len(weights)
    results = made(leaves[0], leaves[1 : 1 + count], leaves[1 + count :])
    loss = sum((n + 1) * result.tanh().abs().sum() for n, result in enumerate(results))
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_two_ranks_compute_what_one_does(dtype: torch.dtype) -> None:
    """Rows of each weight are dealt out; the input's gradient is whole on both ranks.

    Bug: gradients of complex weights were multiplied with the weights, not their conjugates.
    """
    x, weights, biases = layers(dtype)
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


# --- a sum that has begun, and the wait for it


class Late(Planned):
    """An axis of equal ranks whose sums come when they are waited for."""

    def begin_all_reduce(self, x: Tensor) -> Callable[[], None]:
        def wait() -> None:
            x.mul_(self.size)

        return wait


class AtOnce(Planned):
    """An axis whose sums are there when they have begun, and which holds nothing of them."""

    def begin_all_reduce(self, x: Tensor) -> Callable[[], None]:
        return lambda: None


def begun(value: float, axis: str = TP) -> Tensor:
    """[1, 2] of `value`, of which the sum over `axis` has begun."""
    return begin_input_gradient([torch.full((1, 1), float(value))], [torch.ones(1, 2)], axis)


def test_each_wait_is_for_the_sum_of_its_own_tensor() -> None:
    """In whatever order: sums of 1 over 2 ranks and of 10 over 3, between those of others."""
    with collectives.bind(TP, Late(2, 0)), collectives.bind("other", Late(3, 0)):
        sums = [begun(1), begun(10, "other"), begun(100), begun(1000, "other")]
        found = []
        for position in (1, 0, 3, 2):
            finish_(sums[position])
            found.append([total[0, 0].item() for total in sums])
    assert found == [
        [1, 30, 100, 1000],
        [2, 30, 100, 1000],
        [2, 30, 100, 3000],
        [2, 30, 200, 3000],
    ]


def test_a_tensor_whose_sum_has_not_begun_is_refused() -> None:
    with collectives.bind(TP, Late(2, 0)):
        total = begun(1)
        for wrong in (total.clone(), total.view(2), torch.ones(1, 2)):
            with pytest.raises(RuntimeError, match="none has begun") as refused:
                finish_(wrong)
        assert str(refused.value) == (
            "autopipe.finish_ waits for a sum in a tensor of [1, 2] float32 that none has begun "
            "in; under way: the sum of [1, 2] float32 over 'tp'\n"
            "hint: between autopipe.begin_input_gradient and autopipe.finish_ a pass over the "
            "graph may neither copy the tensor nor view it in another shape"
        )
        finish_(total)
        assert total.tolist() == [[2, 2]]
        with pytest.raises(RuntimeError, match="under way: no sum"):
            finish_(total)


def test_an_error_between_leaves_no_sum_under_way() -> None:
    """Until the step has raised, the memory of the sum is taken; then nothing waits in it."""
    with collectives.bind(TP, Late(2, 0)):
        with pytest.raises(MemoryError), all_sums_finished():
            lost = begun(1)
            raise MemoryError
        with pytest.raises(RuntimeError, match="under way: no sum"):
            finish_(lost)
        assert lost.tolist() == [[1, 1]]
        with all_sums_finished():
            following = begun(1)
            finish_(following)
        assert following.tolist() == [[2, 2]]


def test_a_lost_sum_keeps_its_memory_from_later_ones() -> None:
    """An allocator gives freed memory again at once, and the wait would be for the wrong sum."""
    with collectives.bind(TP, AtOnce(2, 0)), pytest.raises(MemoryError), all_sums_finished():
        place = begun(1).data_ptr()  # nothing but the entry holds it
        assert place not in [torch.empty(1, 2).data_ptr() for _ in range(20)]
        raise MemoryError


def test_a_step_that_waits_for_no_end_is_refused() -> None:
    with collectives.bind(TP, Late(2, 0)):
        with pytest.raises(RuntimeError, match=r"sum of \[1, 2\] float32 over 'tp'"):
            with all_sums_finished():
                begun(1)
        with all_sums_finished():
            finish_(begun(1))


# --- which layers are one node


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


class Reads(nn.Module):
    """A block of a decoder: x and what an encoder has made of the batch, each [b, s, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(8, 16), nn.Linear(8, 16)
        self.out = nn.Linear(16, 8)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        return x + self.out(self.keys(encoded).sigmoid() * self.values(encoded))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(Reads() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.norm(x)
        for block in self.blocks:
            x = block(x, encoded)
        return x.square().mean()


def test_layers_of_several_blocks_stay_apart() -> None:
    """Bug: keys and values of all blocks were one node in the first, whose stage had their weights
    and sent a pair of tensors for each later block."""
    trace = trace_model(Decoder(), lambda rows: (noise(rows, 6, 8),))
    flow, blocks = analyse(trace.graph), find_blocks(trace.graph)
    sharding = shard(flow, blocks, axis(2), 2)
    assert sharding.states["blocks.3.keys.weight"] == S(0)
    graph = shard_graph(flow, sharding, 0)
    third = blocks_of(graph, blocks)[2]
    first, second = partition(analyse(graph), [third.first])
    for stage, own, others in ((first, "01", "23"), (second, "23", "01")):
        assert {f"blocks.{n}.keys.weight" for n in own} <= {*stage.states}
        assert not {f"blocks.{n}.keys.weight" for n in others} & {*stage.states}
    assert len(second.receives) == 2  # x, and what the encoder has made


class Weighs(nn.Module):
    """A number of each row: a product with a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.by = nn.LayerNorm(8), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.by).square().mean()


def test_a_vector_has_no_columns() -> None:
    """Bug: such a layer, which may lie so beside others that share its input, broke their node."""
    graph = trace_model(Weighs(), lambda rows: (noise(rows, 6, 8),)).graph
    lies = Sharding(2, {"by": R}, {"linear/0": ((R, R), R)})
    local = shard_graph(analyse(graph), lies, 0)
    assert [node.op for node in local.nodes if node.short in ("linear", "columns")] == [
        "aten.linear.default"
    ]
