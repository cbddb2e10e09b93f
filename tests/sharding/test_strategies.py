"""Every strategy of the rule table is right: each op runs on shards, which are put together."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import REGION_OP, Ref, State
from autopipe.ir.opaque_ops import FUNCTION_OP
from autopipe.planfile.placements import I, P, Placement, R, S
from autopipe.sharding.op import Model, Op, Strategy
from autopipe.sharding.strategies import RULES, strategies
from autopipe.sharding.vocabulary_loss import vocabulary_loss
from autopipe.util import self_checks
from tests.support.dealing import Findings, check
from tests.support.long import LONG, sampled
from tests.support.staged import trace_model, traced
from tests.support.zoo import ZOO, noise

SIZES = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])


FEW = ("gpt", "gpt2", "llama", "mask", "picked", "odd")
"""Models that have among them what the tests below look for; all others are for the long run."""


@cache
def zoo(ranks: int) -> Findings:
    return check((traced(name).graph for name in (ZOO if LONG else FEW)), ranks)


@SIZES
def test_of_the_zoo(ranks: int) -> None:
    found = zoo(ranks)
    assert not found.wrong, "\n".join(found.wrong)


def test_the_zoo_has_what_tensor_parallelism_is_about() -> None:
    """What lies how: the inputs in their order, then the result."""
    assert {"RSSS", "SSPP", "SRRS"} <= zoo(2).sharded["linear"]  # column, row, shards of the rows
    assert {"RSRS", "PSSP"} <= zoo(2).sharded["addmm"]
    assert {"SIS", "SIP"} <= zoo(2).sharded["embedding"]  # columns, and rows of the vocabulary
    assert zoo(2).sharded["cross_entropy_loss"] == {"SII"}
    attention = zoo(2).sharded["scaled_dot_product_attention"]
    assert {"SSSS", "SSSIS"} <= attention <= {"SSSS", "SSSIS", "SSSSS"}
    assert not LONG or "SSSSS" in attention  # T5's bias, of heads, is in no other
    assert {"SS", "SP", "PP"} <= zoo(2).sharded["mean"]


class Computes(nn.Module):
    """x [b, ...] -> a number; what is in between takes x and a few parameters."""

    def __init__(self, compute: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.weights = nn.ParameterList(torch.randn(shape) / 4 for shape in shapes)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x * self.scale, *self.weights).square().mean()


def of_one(compute: Callable[..., Tensor], *shapes: tuple[int, ...], ranks: int) -> Findings:
    model = Computes(compute, *shapes)
    return check([trace_model(model, lambda rows: (noise(rows, 4, 8, 12),)).graph], ranks)


def unbound(x: Tensor) -> Tensor:
    a, b, c, d = x.unbind(1)
    return a * b + c * d


def sliced(x: Tensor) -> Tensor:
    """Two slices that take a dim apart, one that takes anything."""
    return x[..., :4] * x[..., -4:] + x[..., 4:8] * x[..., 1:9:2]


def unevenly(x: Tensor) -> Tensor:
    q, k, v = x.split([8, 2, 2], -1)
    return q.sum(-1, keepdim=True) * k * v


def looked_up(x: Tensor, w: Tensor) -> Tensor:
    at = (x[:, :, 0, 0] > 0).long() * 3
    return F.embedding(at, w, padding_idx=3)


def looked_up_by_frequency(x: Tensor, w: Tensor) -> Tensor:
    """Its gradient is divided by how often all rows together have each word."""
    return F.embedding((x[:, :, 0, 0] > 0).long(), w, scale_grad_by_freq=True)


def squared(x: Tensor) -> Tensor:
    square = x[..., :8]
    return square @ square


def of_experts(x: Tensor, w: Tensor) -> Tensor:
    """Rows of x in four groups, a matrix of w [4, 8, 16] each; halves multiplied."""
    rows = x[..., :8].reshape(-1, 8)
    ends = (rows[:4, 0] * 0).int()
    gate, up = F.grouped_mm(rows.bfloat16(), w.bfloat16(), offs=ends).float().chunk(2, -1)
    return gate.exp() * up


def told_apart(x: Tensor, **how: object) -> Tensor:
    """Classes of [b, 4, 12]; of three kinds of labels, one does not count."""
    labels = (x[:, :, 0, 0] > 0).long() * 2
    return F.cross_entropy(x[:, :, 0].reshape(-1, 12), labels.reshape(-1), **how)


def told_apart_by_bytes(x: Tensor) -> Tensor:
    """The same with labels of uint8, which torch takes, and by which it does not gather."""
    return F.cross_entropy(x[:, 0, 0], (x[:, 0, 1, 0] > 0).byte())


def told_in_parts(x: Tensor, w: Tensor, *bias: Tensor, **how: int) -> Tensor:
    """The same of products with w, in parts of 5 words."""
    labels = (x[:, :, 0, 0] > 0).long() * 9
    asked = {"ignored": -100, "reduction": 1, **how}
    made = vocabulary_loss(
        x[:, :, 0], w, *(bias or [None]), labels, *asked.values(), torch.float64, 5, 0, ""
    )
    found: Tensor = made[0]
    return found


# x is [b, 4, 8, 12]. Beside an op are some of the ways it must be able to go.
OPS: dict[str, tuple[str, Callable[..., Tensor], tuple[tuple[int, ...], ...], set[str]]] = {
    "roll": ("roll", lambda x: x.roll(1, 2), (), {"SS"}),
    "roll all": ("roll", lambda x: x.roll(3), (), set()),
    "flip": ("flip", lambda x: x.flip(1, -1), (), {"SS"}),
    "repeat": ("repeat", lambda x: x.repeat(2, 1, 1, 3, 1), (), {"SS"}),
    "interleave": ("repeat_interleave", lambda x: x.repeat_interleave(3, 2), (), {"SS"}),
    "interleave all": ("repeat_interleave", lambda x: x.repeat_interleave(3), (), set()),
    "cumsum": ("cumsum", lambda x: x.cumsum(-1), (), {"SS"}),
    "glu": ("glu", lambda x: F.glu(x), (), {"SS"}),
    "glu of channels": ("glu", lambda x: F.glu(x, 1), (), {"SS"}),
    "softmax": ("softmax", lambda x: x.softmax(-1), (), {"SS"}),
    "log_softmax": ("log_softmax", lambda x: x.log_softmax(2), (), {"SS"}),
    "stack": ("stack", lambda x: torch.stack([x, x.exp()], 2), (), {"SSS"}),
    "stack at the end": ("stack", lambda x: torch.stack([x, x.exp()], -1), (), {"SSS"}),
    "cat": ("cat", lambda x: torch.cat([x, x.exp()], 2), (), {"SSS"}),
    "cat of one": ("cat", lambda x: torch.cat([x, x, x.exp()], -1), (), {"SSS"}),
    "cat of all sizes": ("cat", lambda x: torch.cat([x[..., :4], x], -1), (), {"SSS"}),
    "cat to nothing": ("cat", lambda x: torch.cat([torch.tensor([]), x], 2), (), {"ISS"}),
    "expand": ("expand", lambda x: x[:, :1].expand(-1, 4, -1, -1), (), {"SS"}),
    "expand in front": ("expand", lambda x: x.expand(3, -1, -1, -1, -1), (), {"SS"}),
    "unflatten": ("unflatten", lambda x: x.unflatten(-1, (4, 3)), (), {"SS", "PP"}),
    "flatten": ("flatten", lambda x: x.flatten(1, 2), (), {"SS", "PP"}),
    "squeeze": ("squeeze", lambda x: x[:, :1].squeeze(1), (), {"SS"}),
    "movedim": ("permute", lambda x: x.permute(0, -1, 1, 2), (), {"SS", "PP"}),
    "select": ("select", lambda x: x[:, :, 3], (), {"SS"}),
    "unbind": ("unbind", unbound, (), {"SS"}),
    "slice": ("slice", sliced, (), {"SS"}),
    "split": ("split_with_sizes", unevenly, (), {"SS"}),
    "chunk": ("chunk", lambda x: torch.mul(*x.chunk(2, -1)), (), {"SS"}),
    "chunk unevenly": ("chunk", lambda x: x.chunk(5, 2)[0], (), {"SS"}),
    "pad": ("pad", lambda x: F.pad(x, (1, 2)), (), {"SS"}),
    "pad two": ("pad", lambda x: F.pad(x, (0, 0, 1, 0)), (), {"SS"}),
    "none": ("index", lambda x: x[:, :, torch.tensor([3, 1, 1])], (), {"SIS", "PIP"}),
    "sum": ("sum", lambda x: x.sum((1, -1)), (), {"SS", "SP", "PP"}),
    "sum of all": ("sum", lambda x: x.sum(), (), {"SP", "PP"}),
    "sum, kept": ("sum", lambda x: x.sum(2, keepdim=True), (), {"SS", "SP", "PP"}),
    "dims of a scalar": (
        "sum",
        lambda x: x * x.sum().sum(0).transpose(0, -1).flip(0),
        (),
        {"SP", "PP"},
    ),
    "mean": ("mean", lambda x: x.mean((0, 2)), (), {"SS", "SP", "PP"}),
    "mean of all": ("mean", lambda x: x.mean(), (), {"SP", "PP"}),
    "var": ("var", lambda x: x.var(-1), (), set()),
    "layer_norm": ("layer_norm", lambda x, w: F.layer_norm(x, (12,), w), ((12,),), {"SRS"}),
    "rms_norm": ("rms_norm", lambda x, w: F.rms_norm(x, (8, 12), w), ((8, 12),), {"SRS"}),
    "linear": ("linear", F.linear, ((8, 12), (8,)), {"RSSS", "SSPP", "SRRS", "PRPP"}),
    "linear, a vector": ("linear", F.linear, ((12,),), set()),
    "linear, one bias of all": ("linear", F.linear, ((8, 12), ()), set()),
    "matmul": ("matmul", torch.matmul, ((12, 8),), {"RSS", "SSP", "SRS", "PRP"}),
    "matmul 2d 3d": ("matmul", lambda x, w: w @ x[:, 0], ((4, 8),), {"SSP", "SRS", "RSS"}),
    "matmul 2d 4d": ("matmul", lambda x, w: w @ x, ((4, 8),), {"SSP", "SRS", "RSS"}),
    "matmul 3d 4d": ("matmul", lambda x, w: w @ x, ((4, 4, 8),), {"SSP", "SRS", "RSS"}),
    "matmul spread": ("matmul", torch.matmul, ((4, 12, 8),), {"RSS", "SSP", "SRS"}),
    "matmul of ones": ("matmul", torch.matmul, ((1, 4, 12, 8),), {"RSS", "SSP", "SRS"}),
    "matmul vector": ("matmul", torch.matmul, ((12,),), set()),
    "bmm": ("bmm", lambda x: torch.bmm(x[:, 0], x[:, 1].mT), (), {"RSS", "SRS", "SSP"}),
    "transposed": ("matmul", lambda x: (x @ x.mT).matmul(x), (), {"RSS"}),
    "squared matrix": ("matmul", squared, (), set()),
    "addmm": (
        "addmm",
        lambda x, b, w: torch.addmm(b, x.reshape(-1, 12), w),
        ((8,), (12, 8)),
        {"SRSS", "PSSP", "RSRS", "PPRP"},
    ),
    "conv1d": ("conv1d", lambda x, w: F.conv1d(x[:, 0], w), ((4, 8, 3),), {"RSS", "SSP"}),
    "grouped": (
        "conv1d",
        lambda x, w, b: F.conv1d(x[:, 0], w, b, groups=4),
        ((16, 2, 3), (16,)),
        {"SSSS"},
    ),
    "depthwise": (
        "conv1d",
        lambda x, w: F.conv1d(x[:, 0], w, padding=2, groups=8),
        ((8, 1, 3),),
        {"SSS"},
    ),
    "conv2d": ("conv2d", F.conv2d, ((8, 4, 3, 3), (8,)), {"RSSS", "SSPP"}),
    "attention": (
        "scaled_dot_product_attention",
        lambda x: F.scaled_dot_product_attention(x, x.exp(), x.sin(), is_causal=True),
        (),
        {"SSSS"},
    ),
    "a mask of heads": (
        "scaled_dot_product_attention",
        lambda x, m: F.scaled_dot_product_attention(x, x.exp(), x.sin(), attn_mask=m),
        ((4, 8, 8),),
        {"SSSSS"},
    ),
    "keys of all rows": (
        "scaled_dot_product_attention",
        lambda x: F.scaled_dot_product_attention(x, x[0].exp(), x[0].sin()),
        (),
        set(),
    ),
    "embedding": ("embedding", looked_up, ((64, 8),), {"SIP", "SIS", "RSS"}),
    "uneven vocabulary": ("embedding", looked_up, ((67, 8),), {"SIP", "SIS", "RSS"}),
    "embedding by frequency": ("embedding", looked_up_by_frequency, ((4, 8),), {"SIS"}),
    "cross_entropy": ("cross_entropy_loss", told_apart, (), {"SII"}),
    "ignored": ("cross_entropy_loss", lambda x: told_apart(x, ignore_index=2), (), {"SII"}),
    "summed": ("cross_entropy_loss", lambda x: told_apart(x, reduction="sum"), (), {"SII"}),
    "labels of bytes": ("cross_entropy_loss", told_apart_by_bytes, (), set()),
    "smoothed": ("cross_entropy_loss", lambda x: told_apart(x, label_smoothing=0.1), (), set()),
    "each": ("cross_entropy_loss", lambda x: told_apart(x, reduction="none"), (), set()),
    "in parts": ("vocabulary_loss", told_in_parts, ((12, 12), (12,)), {"RSSII"}),
    "in parts, unevenly": ("vocabulary_loss", told_in_parts, ((67, 12),), {"RSII"}),
    "in parts, ignored": (
        "vocabulary_loss",
        lambda x, w: told_in_parts(x, w, ignored=9, reduction=2),
        ((12, 12),),
        {"RSII"},
    ),
    "a number less": ("sub", lambda x: 1 - x.exp() - 1, (), {"SS"}),
    "times alpha": ("add", lambda x, w: torch.add(x, w, alpha=3), ((12,),), {"PPP", "SSS", "SRS"}),
    "divided": ("div", lambda x, w: x / (w + 9), ((8, 1),), {"PRP", "SSS", "SRS"}),
    "rounded down": ("div", lambda x: torch.div(x, 0.3, rounding_mode="floor") + x, (), {"SS"}),
    "squared": ("mul", lambda x: x * x, (), {"SS"}),
    "like a larger one": ("type_as", lambda x: x * torch.tensor(2).type_as(x), (), {"ISI"}),
    "like a smaller one": (
        "type_as",
        lambda x, w: (x > 0).type_as(w) * x,
        ((12,),),
        {"SRS", "SSS"},
    ),
    "like an integer": (
        "type_as",
        lambda x, w: x[..., :8] * F.linear(x, w).type_as(torch.tensor([2])),
        ((8, 12),),
        {"SIS"},
    ),
    "where": ("where", lambda x, w: torch.where(x > 0, x, w), ((12,),), {"SSSS", "SSRS"}),
}


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("name", OPS)
def test_of_ops_that_the_zoo_has_not(name: str) -> None:
    """On 2 ranks and on 4; on 2 by default."""
    op, compute, shapes, ways = OPS[name]
    for ranks in sampled((2, 4), of=2):
        found = of_one(compute, *shapes, ranks=ranks)
        assert not found.wrong, "\n".join(found.wrong)
        if ranks == 2:
            had = found.sharded.get(op, set())
            assert ways <= had and (ways or not had)


def test_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(self_checks.VARIABLE, "0")  # fake tensors have no such kernel in float64
    found = of_one(of_experts, (4, 8, 16), ranks=2)
    assert not found.wrong, "\n".join(found.wrong)
    assert {"RSIS", "SSIP", "PRIP"} <= found.sharded["_grouped_mm"]


def test_most_rules_were_looked_at() -> None:
    """Beside these: names that other versions of torch give to the same, and decomposed ops."""
    seen = set(zoo(2).sharded)
    seen |= {op for op, *_ in OPS.values()}
    others = {"_unsafe_view", "t", "numpy_T", "expand_as", "mm", "conv3d", "constant_pad_nd"}
    others |= {"_grouped_mm", "grouped_mm_fallback"}  # above
    assert set(RULES) - seen <= others | {"_softmax", "_log_softmax", "cumprod"}


# A checker that never says no would check nothing.


@pytest.mark.parametrize(
    ("x", "w", "made", "complaint"),
    [
        (R, S(0), S(2), "node makes torch.float64 [3, 4, 8, 4], not"),  # columns are the last dim
        (R, S(1), S(3), "RuntimeError"),
        (S(3), S(1), R, "the result is off"),  # partial sums that nobody adds
        (S(2), I, S(2), "the gradient of [1] is off"),  # each rank has a part of it only
        (P, P, P, "the result is off"),
    ],
)
def test_a_wrong_rule_is_found(
    monkeypatch: pytest.MonkeyPatch, x: Placement, w: Placement, made: Placement, complaint: str
) -> None:
    def wrong(op: Op) -> Iterator[Strategy]:
        yield Strategy(dict(zip(op.inputs, (x, w), strict=True)), made)

    monkeypatch.setitem(RULES, "linear", wrong)
    monkeypatch.setenv(self_checks.VARIABLE, "0")  # it would refuse the graph before it is run
    (found,) = of_one(F.linear, (8, 12), ranks=2).wrong
    assert complaint in found


class WritesItsScores(nn.Module):
    """Attention that adds to a part of its scores in place, as MViT adds its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1)
        scores[:, 1:] = scores[:, 1:] * 2
        return (scores.softmax(-1) @ x).mean()


def test_what_is_written_in_place_lies_one_way_alone() -> None:
    """A conversion, from R to I too, makes another tensor: readers of it would miss the write."""
    graph = trace_model(WritesItsScores(), lambda rows: (noise(rows, 8, 12),)).graph
    model = Model(analyse(graph), 2)
    touching = [node for node in graph.nodes if {*model.tensors(node)} & model.fixed]
    assert {node.op for node in touching} >= {"aten.copy_.default", "aten.softmax.int"}
    for node in touching:
        (only,) = strategies(model, node, lambda value: ())
        assert only.output == I and set(only.inputs.values()) == {I}, node.name


def test_integers_are_no_partial_sums() -> None:
    """Bug: half of 3 is 1.5, so what two ranks added was of fp32, where the graph says int64."""
    model = Computes(lambda x, w: F.linear(x, w) + torch.arange(8), (8, 12))
    graph = trace_model(model, lambda rows: (noise(rows, 4, 8, 12),)).graph
    (add,) = (node for node in graph.nodes if node.op == "aten.add.Tensor")
    assert all(
        P not in strategy.inputs.values()
        for strategy in strategies(Model(analyse(graph), 2), add, lambda value: ())
    )


def test_of_nothing_there_are_no_parts() -> None:
    """A layer of no inputs, as of a data set without optional features: its weight is [8, 0]."""
    model = Computes(lambda x, w: F.linear(x[..., :0], w) + x[..., :8], (8, 0))
    graph = trace_model(model, lambda rows: (noise(rows, 4, 8, 12),)).graph
    facts, weight = Model(analyse(graph), 2), State("weights.0")
    assert not any(facts.can_shard(weight, S(dim)) for dim in (0, 1))
    # Nor is there one for the last of seven ranks, whose parts of 8 are 2 2 2 2 0 0 0.
    assert not Model(analyse(graph), 7, least=1).can_shard(Ref("slice/1"), S(2))


class KeepsTheUpperBits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x)
        return made * (made.detach().view(torch.int32) & -256).view(torch.float32)


def test_bits_read_as_another_dtype_stay_whole() -> None:
    """Bug: a part was viewed by its shape, where a dtype stood: `x.view(torch.int32)`."""
    graph = trace_model(KeepsTheUpperBits(), lambda rows: (noise(rows, 12),), squares).graph
    read = [node for node in graph.nodes if node.op == "aten.view.dtype"]
    assert len(read) == 2
    for node in read:
        for strategy in strategies(Model(analyse(graph), 2), node, lambda value: (S(1),)):
            assert not strategy.output.sharded


class Clamp(torch.autograd.Function):
    """Gives x; in backward a gradient of at most 0.1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.1, 0.1)


class ByFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Clamp.apply(x)
        return found


class ByHook(nn.Module):
    """The same; a part that runs as it is."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.clone()
        kept.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return kept


def squares(outputs: Tensor, batch: object) -> Tensor:
    return outputs.square().mean()


@pytest.mark.parametrize("kind", [ByFunction, ByHook])
def test_a_backward_that_users_write_gets_the_whole_gradient(kind: type[nn.Module]) -> None:
    """Bug: two ranks clamped a summand of a gradient each, to a sum of up to twice as much. All R,
    as any op may have it, was one of the strategies: there gradients are such summands."""
    model = nn.Sequential(nn.Linear(12, 12), kind(), nn.Linear(12, 12))
    graph = trace_model(model, lambda rows: (noise(rows, 12),), squares).graph
    (node,) = (node for node in graph.nodes if node.op in (FUNCTION_OP, REGION_OP))
    (only,) = strategies(Model(analyse(graph), 2), node, lambda value: ())
    assert only.output == I and set(only.inputs.values()) == {I}
