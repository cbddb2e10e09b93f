"""What takes a fused weight apart asks for its segments."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import Graph, State
from autopipe.planfile.placements import Placement, S
from autopipe.sharding.fused_segments import demands
from autopipe.sharding.op import Model
from tests.support.staged import trace_model, traced
from tests.support.zoo import noise


def asked(graph: Graph, name: str, ranks: int = 2) -> set[Placement]:
    return set(demands(Model(analyse(graph), ranks)).get(State(name), ()))


def test_gpt2s_weight_is_three_matrices() -> None:
    graph = traced("gpt2").graph
    weights = [name for name in graph.states if "c_attn.weight" in name]
    assert len(weights) == 4
    for name in weights:
        assert S(1, 3) in asked(graph, name)
        assert S(0, 3) in asked(graph, name.replace("weight", "bias"))


def test_what_a_view_tells_apart() -> None:
    """qkv(x).unflatten(2, (3, 4, -1)): the three are in front of the heads."""
    assert S(0, 3) in asked(traced("gpt").graph, "blocks.2.qkv.weight")
    assert S(0, 3) in asked(traced("gpt").graph, "blocks.2.qkv.bias")


class Fused(nn.Module):
    """x [b, 5, 8] through one weight [24, 8], whose 24 are then taken apart."""

    def __init__(self, apart: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.apart = nn.Linear(8, 24), apart

    def forward(self, x: Tensor) -> Tensor:
        return self.apart(self.linear(x)).square().mean()


def of_weight(apart: Callable[[Tensor], Tensor]) -> set[Placement]:
    graph = trace_model(Fused(apart), lambda rows: (noise(rows, 5, 8),)).graph
    weight, bias = asked(graph, "linear.weight"), asked(graph, "linear.bias")
    assert weight == bias
    return weight


def test_ways_to_take_it_apart() -> None:
    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def grouped(x: Tensor) -> Tensor:
        q, k, v = x.split([16, 4, 4], -1)
        return q.sum(-1, keepdim=True) * k * v

    def sliced(x: Tensor) -> Tensor:
        return x[..., :16].sum(-1, keepdim=True) * x[..., 16:20] * x[..., 20:]

    assert of_weight(gated) == {S(0, 2)}
    assert of_weight(lambda x: gated(2 * x.transpose(1, 2).exp().transpose(1, 2))) == {S(0, 2)}
    assert of_weight(grouped) == {S(0, (16, 4, 4))}
    assert of_weight(sliced) == {S(0, (16, 4, 4))}
    assert S(0, 4) in of_weight(lambda x: x.unflatten(-1, (4, 6)))


def test_nobody_asks_for_anything() -> None:
    assert of_weight(torch.relu) == set()
    assert of_weight(lambda x: x[..., :24]) == set()
