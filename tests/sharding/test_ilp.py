"""The plans are Megatron-LM's where that is best, and the best there are where brute force can say.

a layer   x -> norm -> f -> q, k, v -> attention -> out -> g -> +    forward: two all-reduces (g)
            -> norm -> f -> up -> gelu -> down         -> g -> +    backward: two all-reduces (f)
"""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import Dataflow, analyse, gradient_values
from autopipe.ir.graph import Graph, Ref, State, Value, at_batch, bytes_at, values_in
from autopipe.planfile.placements import I, Move, Placement, R, Sharding, moves
from autopipe.sharding.ilp import (
    AxisCosts,
    Variables,
    choices_of,
    is_strided,
    shard,
    strategy_costs,
)
from autopipe.sharding.local_graph import sent_by, shard_graph, whole_bytes
from autopipe.sharding.op import Model
from tests.support.long import chosen
from tests.support.simulated import axis
from tests.support.staged import trace_model, traced
from tests.support.zoo import noise

ROWS = 2


def planned(graph: Graph, ranks: int = 2, **options: bool) -> Sharding:
    return shard(analyse(graph), find_blocks(graph), axis(ranks), ROWS, **options)


def sent(graph: Graph, sharding: Sharding, path: str) -> list[tuple[str, Move, int]]:
    """What ranks exchange in a module call: the way, the collective, the bytes of the whole."""
    local = shard_graph(analyse(graph), sharding, 0)
    carrying = gradient_values(local)
    found = []
    for node in local.nodes:
        if path in node.scopes:
            for way, move in zip(("forward", "backward"), sent_by(node, carrying), strict=True):
                if move is not None:
                    size = whole_bytes(local, node, sharding.ranks)
                    found.append((way, move, at_batch(size, ROWS)))
    return found


LAYERS = {"gpt": "blocks.2", "gpt2": "transformer.h.2", "llama": "model.layers.2"}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_layer_of_megatrons(name: str, ranks: int) -> None:
    graph = traced(name).graph
    if name == "llama" and ranks == 4:
        pytest.skip("two heads of keys and values are not enough for four ranks")
    found = sent(graph, planned(graph, ranks), LAYERS[name])
    counted = Counter((way, move.name) for way, move, _ in found)
    assert counted == {("forward", "all-reduce"): 2, ("backward", "all-reduce"): 2}


def test_where_gpt2s_matrices_go() -> None:
    states = planned(traced("gpt2").graph).states
    layer = {
        name.removeprefix("transformer.h.1."): str(lies)
        for name, lies in states.items()
        if name.startswith("transformer.h.1.")
    }
    assert layer.pop("attn.c_attn.weight") == "S(1, 3)"  # q, k and v are divided, each by itself
    assert layer.pop("attn.c_attn.bias") == "S(0, 3)"
    assert layer.pop("attn.c_proj.weight") == "S(0)"
    assert layer.pop("mlp.c_fc.weight") == "S(1)"
    assert layer.pop("mlp.c_fc.bias") == "S(0)"
    assert layer.pop("mlp.c_proj.weight") == "S(0)"
    assert set(layer.values()) <= {"R", "P"}  # norms, and biases that are added to sums


def test_all_matrices_of_a_layer_are_divided() -> None:
    for name, path in LAYERS.items():
        graph = traced(name).graph
        states = planned(graph).states
        for state, spec in graph.states.items():
            if state.startswith(path + ".") and len(spec.spec.shape) == 2:
                assert states[state].sharded, state


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize(
    ("name", "path", "tokens", "sums"),
    [
        ("llama", "model.layers.2", 12, 4),
        ("gpt2", "transformer.h.2", 12, 4),
        ("t5", "encoder.block.1", 12, 4),
        ("t5", "decoder.block.1", 8, 6),
    ],
)
def test_no_more_is_sent_than_megatron_sends(name: str, path: str, tokens: int, sums: int) -> None:
    """A layer's all-reduces are of one activation [b, s, h] each: 2 (n - 1) / n times its bytes.

    A decoder's layer has cross-attention besides, with a sum of the gradient of what comes from
    the encoder, of 12 tokens.
    """
    graph, ranks = traced(name).graph, 2
    all_tokens = sums * tokens + (12 if path.startswith("decoder") else 0)
    megatron = 2 * (ranks - 1) / ranks * all_tokens * ROWS * 32 * 4
    found = sum(
        move.rounds * (ranks - 1) / ranks * size
        for _, move, size in sent(graph, planned(graph, ranks), path)
    )
    assert 0 < found <= megatron


# The optimum


class Tiny(nn.Module):
    """Four ops: x [b, 6, 8] -> linear, gelu, linear, mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).mean()


class Shared(nn.Module):
    """One input of two products, whose gradients are summed together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        return (y.matmul(self.a) * y.matmul(self.b)).sum()


def seconds_of(flow: Dataflow, on: AxisCosts, sharding: Sharding) -> float:
    """What the program minimizes, summed up over one assignment."""
    graph, model = flow.graph, Model(flow, on.ranks)
    costs = strategy_costs(model, Variables(model, ()), on, ROWS)
    total, made = 0.0, {}
    for name in graph.states:
        lies = sharding.states.get(name, I)
        made[State(name)] = lies
        total += costs(State(name), ((), lies))
    wanted: dict[Value, set[Placement]] = {v: {I} for v in values_in(graph.outputs)}
    for node in graph.nodes:
        tensors = tuple(v for v in dict.fromkeys(node.values()) if model.is_tensor(v))
        inputs, output = sharding.nodes.get(node.name, ((I,) * len(tensors), I))
        total += costs(node.name, (inputs, output))
        made |= {Ref(node.name, number): output for number in range(len(node.outputs))}
        for value, lies in zip(tensors, inputs, strict=True):
            wanted.setdefault(value, set()).add(lies)
    for value, targets in wanted.items():
        for target in targets:
            total += _conversion(model, on, value, made.get(value, I), target)
    return total


def _conversion(
    model: Model, on: AxisCosts, value: Value, source: Placement, target: Placement
) -> float:
    differentiable = value in model.carrying
    if not differentiable:
        source, target = (I if lies == R else lies for lies in (source, target))
    sent = moves(source, target, differentiable)
    if sent is None:
        return float("inf")
    if source == target:
        return 0.0
    spec = model.graph.spec(value)
    shape = tuple(size if isinstance(size, int) else ROWS for size in spec.shape)
    size = bytes_at(spec, ROWS)
    strided = any(is_strided(shape, lies) for lies in (source, target))
    seconds = sum(on.seconds(move, size, strided=strided) for move in sent)
    return 1e-3 * size / on.link.bandwidth + seconds


def cheapest(flow: Dataflow, on: AxisCosts) -> float:
    """The least of all assignments; those that cost too much by half are not seen to the end."""
    graph, model = flow.graph, Model(flow, on.ranks)
    variables = Variables(model, ())
    choices, costs = choices_of(model, variables, False), strategy_costs(model, variables, on, ROWS)
    best = float("inf")

    def go(at: int, made: dict[Value, Placement], paid: frozenset[object], total: float) -> None:
        nonlocal best
        if total >= best:
            return
        if at == len(graph.states) + len(graph.nodes):
            for value in values_in(graph.outputs):
                if (value, I) not in paid:
                    total += _conversion(model, on, value, made.get(value, I), I)
            best = min(best, total)
            return
        if at < len(graph.states):
            maker: Value = State(list(graph.states)[at])
            variable, read = variables.of(maker), ()
        else:
            node = graph.nodes[at - len(graph.states)]
            maker, variable, read = Ref(node.name), node.name, tuple(dict.fromkeys(node.values()))
        for choice in choices[variable]:
            more, sent = total + costs(variable, choice), set(paid)
            for value, lies in zip(read, choice[0], strict=True):
                if (value, lies) not in sent:
                    sent.add((value, lies))
                    more += _conversion(model, on, value, made.get(value, I), lies)
            go(at + 1, {**made, maker: choice[1]}, frozenset(sent), more)

    go(0, {}, frozenset(), 0.0)
    return best


@pytest.mark.parametrize("model", [Tiny, Shared])
def test_brute_force_finds_nothing_cheaper(model: type[nn.Module]) -> None:
    graph = trace_model(model(), lambda rows: (noise(rows, 6, 8),)).graph
    flow = analyse(graph)
    best = cheapest(flow, axis(2))
    found = seconds_of(flow, axis(2), shard(flow, (), axis(2), ROWS))
    assert found == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("name", chosen(("gpt", "gpt2", "llama", "unet"), now=("gpt", "unet")))
def test_layers_alike_cost_no_more_than_each_for_itself(name: str) -> None:
    graph = traced(name).graph
    flow = analyse(graph)
    alike, each = (seconds_of(flow, axis(2), planned(graph, alike=a)) for a in (True, False))
    assert alike == pytest.approx(each, rel=1e-3)


def test_a_sequence_is_sharded_if_asked_for() -> None:
    """It is one more way to go, so the best is no worse."""
    graph = traced("gpt").graph
    plain, sequence = (planned(graph, sequence=s) for s in (False, True))
    flow = analyse(graph)
    cost = [seconds_of(flow, axis(2), sharding) for sharding in (plain, sequence)]
    assert cost[1] <= cost[0] * (1 + 1e-9)
