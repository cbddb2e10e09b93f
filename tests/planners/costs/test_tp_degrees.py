"""Which tensor-parallel degrees are tried, and the cost of degrees with exchanges."""

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from autopipe.cluster.cluster import Cluster, Link
from autopipe.cluster.spec import parse
from autopipe.cluster.tp_groups import slowest_kind, tp_groups
from autopipe.errors import InfeasibleError
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import Graph
from autopipe.planfile.placements import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Placement
from autopipe.planners.costs.tp_degrees import (
    Degree,
    as_one_rank,
    check_degree,
    degrees,
    move_seconds,
    sending_seconds,
)
from autopipe.sharding.functionalize import out_of_place
from autopipe.sharding.strategies import check_possible
from autopipe.tracing.traced import Trace
from tests.support.inprocess import machine
from tests.support.staged import trace_model, traced


def graph_of_four_heads() -> Graph:
    return traced("gpt").graph


@pytest.mark.parametrize(
    ("cluster", "near", "far"),
    [
        ("8xA100-80GB", (1, 2, 4, 8), ()),
        ("2x8xA100-80GB", (1, 2, 4, 8), (16,)),  # over the link between the nodes if it must be
        ("6xA100-80GB", (1, 2, 3, 4, 6), ()),  # of 4, two devices stay idle
        ("7xA100-80GB", (1, 2, 4, 7), ()),  # four heads divide by neither 3 nor 5
        ("2x6xA100-80GB", (1, 2, 3, 4, 6), ()),
        ("2xA100-80GB+4xA100-40GB", (1, 2, 4), ()),  # of 4, the first node stays idle
        ("1x3xA100-80GB+1x2xA100-80GB", (1, 2), ()),
        ("4x1xA100-80GB", (1,), (2, 4)),
        ("A100-80GB", (1,), ()),
    ],
)
def test_degrees_that_are_tried(cluster: str, near: tuple[int, ...], far: tuple[int, ...]) -> None:
    found = parse(cluster)
    assert isinstance(found, Cluster)
    assert degrees(found, None, graph_of_four_heads()) == (near, far)


def test_a_degree_that_is_asked_for() -> None:
    """It need not divide the devices: some stay idle then."""
    graph = graph_of_four_heads()
    assert degrees(machine(8), 3, graph) == ((3,),)
    with pytest.raises(InfeasibleError) as refused:
        degrees(machine(8), 9, graph)
    assert str(refused.value) == (
        "tp=9 was asked for, and local:8 has 8 devices\nhint: tp of at most 8"
    )


def at(tp: int, name: str = "gpt") -> Degree:
    return degree_of(traced(name), tp)


def degree_of(trace: Trace, tp: int) -> Degree:
    blocks = find_blocks(trace.graph)
    cluster = machine(tp)
    kind = slowest_kind(tp_groups(cluster, tp))
    return as_one_rank(tp, trace, analyse(trace.graph), blocks, cluster, 2, slowest=kind)


def test_a_degree_that_divides_nothing() -> None:
    with pytest.raises(InfeasibleError) as refused:
        at(7)
    said = refused.value
    assert said.message.startswith(
        "tp=7 was asked for, and no parameter divides into 7 equal parts"
    )
    assert said.hint is not None and said.hint.startswith("tp of 2, 3, 4, 6")


class Flat(nn.Module):
    """All layers in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.flat.view(8, 8)).square().mean()


def test_a_degree_where_no_parameter_is_a_matrix() -> None:
    """Bug: `their matrices have dims of `, and nothing behind it."""
    trace = trace_model(Flat(), lambda rows: {"x": torch.ones(rows, 8)}, None)
    with pytest.raises(InfeasibleError, match="7 equal parts: none of them is a matrix"):
        check_degree(trace.graph, 7)


def test_a_degree_that_divides_no_dim_is_refused_before_anything_is_measured() -> None:
    """Bug: `costs --tp 100` had a hundred processes measure this machine for it first."""
    graph = traced("gpt").graph
    check_degree(graph, 2)
    with pytest.raises(InfeasibleError, match="^tp=7 was asked for, and the 4 heads of") as refused:
        check_degree(graph, 7)
    assert refused.value.hint == "tp of 1, 2, 4"


class Heads(nn.Module):
    """Attentions of as many heads as are given, one after another, over 8 channels.

    `folded`: heads are rows of the attention, as SAM has them.
    """

    def __init__(self, *heads: int, folded: bool = False) -> None:
        super().__init__()
        self.heads, self.folded = heads, folded
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for heads in self.heads:
            q = self.layer(x).unflatten(-1, (heads, 8 // heads)).transpose(1, 2)
            q = q.flatten(0, 1) if self.folded else q
            made = nn.functional.scaled_dot_product_attention(q, q, q)
            x = made.reshape(-1, heads, 3, 8 // heads).transpose(1, 2).flatten(2)
        return x.square().mean()


def test_a_degree_that_leaves_every_attention_whole_is_refused() -> None:
    """Bugs: SegFormer, of whose stages the first has one head, was refused altogether.

    And SAM was, for heads that are rows of the attention were said to be one head; and an
    autoencoder, whose only attention has one head among convolutions ("hint: tp of 1").
    """

    def graph(*heads: int, folded: bool = False) -> Graph:
        model = Heads(*heads, folded=folded)
        return trace_model(model, lambda rows: {"x": torch.ones(rows, 3, 8)}).graph

    three = graph(1, 2, 4)
    check_degree(three, 2)
    check_degree(graph(4, folded=True), 2)
    check_degree(graph(1), 2)
    with pytest.raises(InfeasibleError, match="the 2 heads of scaled_dot_product_attention/1 do"):
        check_degree(three, 3)


def test_blocks_stand_where_they_stood() -> None:
    whole, half = at(1), at(2)
    assert [block.path for block in half.blocks] == [block.path for block in whole.blocks]
    for block in half.blocks:
        own = half.trace.graph.nodes[block.first : block.stop]
        assert all(block.path in node.scopes for node in own)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Swapped(nn.Module):
    """An MLP whose input has its halves swapped: filled slice by slice, or put together."""

    def __init__(self, by_slices: bool) -> None:
        super().__init__()
        self.by_slices = by_slices
        self.norm = Norm()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        halves = x[..., 4:], x[..., :4]
        if self.by_slices:
            swapped = x.new_empty(x.shape)
            swapped[..., :4], swapped[..., 4:] = halves
        else:
            swapped = torch.cat(halves, -1)
        return x + self.down(self.up(self.norm(swapped)).tanh().square())


class Filled(nn.Module):
    def __init__(self, by_slices: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Swapped(by_slices) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layers(x)).square().mean()


def test_blocks_are_alike_in_which_a_tensor_is_filled_slice_by_slice() -> None:
    """Bug: nodes of other blocks shared their strategies. LongCat ended in an IndexError."""

    def found(by_slices: bool) -> dict[str, Placement]:
        model = Filled(by_slices)
        trace = trace_model(model, lambda rows: {"x": torch.ones(rows, 3, 8)})
        degree = degree_of(trace, 2)
        assert degree.sharding is not None
        return dict(degree.sharding.states)

    assert found(by_slices=True) == found(by_slices=False)


class WrittenBefore(nn.Module):
    """Some of what the blocks read is written in place, as T5Gemma 2 does where a picture ends; its
    first block begins with a view of that: a cast to the dtype that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.end = nn.Embedding(512, 64), nn.Parameter(torch.ones(64))
        self.layers = nn.Sequential(*(Casting() for _ in range(8)))
        self.head = nn.Linear(64, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) * 2
        hidden.copy_(torch.where((x == 3)[..., None], self.end, hidden))
        return cast(Tensor, self.head(self.layers(hidden))).square().mean()


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        read = x.float()
        normal = read * torch.rsqrt(read.pow(2).mean(-1, keepdim=True))
        return x + self.down(self.up(normal).tanh())


def test_a_block_that_views_what_is_written_before_it_is_of_a_class_of_its_own() -> None:
    """Bug: it got the strategies of the others, and the plan was refused as one that computes
    something else."""
    trace = trace_model(
        WrittenBefore(), lambda rows: {"x": torch.zeros(rows, 24, dtype=torch.long)}
    )
    sharding = degree_of(trace, 2).sharding
    assert sharding is not None
    assert {"layers.0.up/linear/0", "layers.1/to/0"} <= sharding.nodes.keys()
    assert "layers.0/to/0" not in sharding.nodes
    check_possible(analyse(out_of_place(trace.graph)), sharding)


@pytest.mark.parametrize("precision, itemsize", [("fp32", 4), ("bf16-autocast", 2)])
def test_seconds_of_a_collective(precision: str, itemsize: int) -> None:
    """An all-reduce of B bytes among n takes 2 (n - 1) (latency + B / n / bandwidth) on a ring."""
    degree, rows = at(2), 2
    link = Link(1e-5, 1e9)
    size = rows * 12 * 32 * itemsize  # [b, s, h], which a matrix product has made or multiplies
    expected = 2 * (link.latency + size / 2 / link.bandwidth)
    graph = degree.trace.graph
    seconds = sending_seconds(graph, rows, link, 2, precision)
    by_name = dict(zip((node.name for node in graph.nodes), seconds, strict=True))
    assert by_name["blocks.1.down/linear/0>I"] == pytest.approx((expected, 0.0))
    assert by_name["blocks.1.up/linear/0"] == pytest.approx((0.0, expected))
    assert by_name["blocks.1/gelu/0"] == (0.0, 0.0)


def test_a_collective_has_the_rate_that_its_kind_was_measured_at() -> None:
    """4 ranks move 3/4 of 800 bytes in each round, an all-to-all a quarter of that; the first step
    takes 5 s, each of the others 1 s."""
    link = Link(5.0, 600.0, summing=200.0, gathering=300.0, hop=1.0)
    assert move_seconds(ALL_REDUCE, 800, link, 4) == 2 * 600 / 200 + 5.0 + 5 * 1.0
    assert move_seconds(ALL_GATHER, 800, link, 4) == 600 / 300 + 5.0 + 2 * 1.0
    assert move_seconds(ALL_TO_ALL, 800, link, 4) == 150 / 600 + 5.0 + 2 * 1.0
    assert move_seconds(None, 800, link, 4) == 0.0
