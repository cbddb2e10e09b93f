"""Attentions as people write them out, the one op that each becomes, and what has to stay."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe
from autopipe import AutopipeError, Plan
from autopipe.ir.graph import Graph, arguments
from autopipe.report import facts
from autopipe.rewriting.attentions import attentions
from autopipe.rewriting.fused_attention import ATTENTION, fused
from autopipe.tracing.traced import Trace
from tests.support.inprocess import machine
from tests.support.long import LONG
from tests.support.staged import Step, staged_step, trace_model

HEADS, LENGTH, SIZE = 4, 6, 8
WIDTH = HEADS * SIZE
SCALE = SIZE**-0.5

Attend = Callable[["Model", Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Queries, keys and values [b, heads, s, d] of x [b, s, h], and what `attend` makes of them."""

    later: Tensor
    drawn: Tensor

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.few = nn.Linear(WIDTH, 2 * (WIDTH // 2))
        self.slopes = nn.Parameter(torch.linspace(-1, 1, HEADS).view(HEADS, 1, 1))
        self.whole = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.register_buffer("later", torch.ones(LENGTH, LENGTH).triu(1).bool())
        self.register_buffer("drawn", torch.randn(LENGTH, LENGTH))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        q, k, v = (heads(part) for part in self.inner(x).split(WIDTH, -1))
        y = self.attend(self, q, k, v)
        if y.dim() == 4:
            y = y.transpose(1, 2).reshape(x.shape)
        return (self.outer(y) ** 2).mean()


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], -1, SIZE).transpose(1, 2)


def inputs(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, LENGTH, WIDTH, generator=torch.Generator().manual_seed(rows))}


def traced(attend: Attend) -> tuple[Model, Trace]:
    model = Model(attend)
    return model, trace_model(model, inputs)


def written_out(graph: Graph) -> bool:
    return any(node.short == "softmax" for node in graph.nodes)


# As people write them


def plain(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * SCALE).softmax(-1) @ v


def nanogpt(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
    scores = scores.masked_fill(m.later[None, None], float("-inf"))
    return F.dropout(F.softmax(scores, dim=-1), 0.0, m.training) @ v


def lowest(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The second query has no key at all, and weighs all of them equally."""
    hidden = m.later.clone()
    hidden[1] = True
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / SIZE**0.5
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1) @ v


def gpt2(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers had it: a choice, in fp32, cast back."""
    scores = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], SIZE**0.5)
    low = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
    scores = torch.where(~m.later, scores, low)
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v


def other_way_round(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.where(m.later, float("-inf"), SCALE * (q @ k.mT)).softmax(-1) @ v


def bmm(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three dims, as OPT and Bloom: rows and heads are one."""
    q, k, v = (part.reshape(-1, LENGTH, SIZE) for part in (q, k, v))
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1).expand(len(q), -1, -1)
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=SCALE)
    return torch.bmm(scores.softmax(-1), v).reshape(-1, HEADS, LENGTH, SIZE)


def added(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(m.later, -torch.inf)
    return F.softmax(torch.matmul(q, k.transpose(2, 3)) * SCALE + mask, -1) @ v


def annotated(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three dims, and a number that is no infinity: what a query without keys makes is a mean."""
    q, k, v = (part.reshape(-1, LENGTH, SIZE) for part in (q, k, v))
    hidden = m.later.clone()
    hidden[3] = True
    scores = torch.bmm(q, k.transpose(1, 2)) / SIZE**0.5
    weights = scores.masked_fill(hidden, -1e9).softmax(-1)
    return torch.bmm(weights, v).reshape(-1, HEADS, LENGTH, SIZE)


def multihead(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own module, which makes weights that nobody wants."""
    return m.whole(m.x, m.x, m.x, attn_mask=m.later)[0]


def grouped(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two heads of keys and values, each read by two of queries."""
    k, v = (heads(part) for part in m.few(m.x).split(WIDTH // 2, -1))
    k, v = (
        part[:, :, None].expand(-1, -1, 2, -1, -1).reshape(-1, HEADS, LENGTH, SIZE)
        for part in (k, v)
    )
    return plain(m, q, k, v)


WRITTEN = [plain, nanogpt, lowest, gpt2, other_way_round, added, bmm, annotated, multihead, grouped]


@pytest.mark.sweep(of=5)
@pytest.mark.parametrize("attend", WRITTEN, ids=lambda attend: attend.__name__)
def test_becomes_one_op_and_computes_the_same(attend: Attend) -> None:
    """Loss and gradients are the model's own to rounding, and no [s, s] of heads is left."""
    model, trace = traced(attend)
    made = replace(trace, graph=fused(trace.graph))
    assert written_out(trace.graph) and not written_out(made.graph)
    assert [node.op for node in made.graph.nodes].count(ATTENTION) == 1
    steps = [staged_step(model, each, inputs(4), [], 2) for each in (trace, made)]
    assert off(*steps) < 1e-6


def off(step: Step, other: Step) -> float:
    """The largest difference of losses, and of gradients by their largest entry."""
    found = [float((a - b).abs()) for a, b in zip(step.losses, other.losses, strict=True)]
    for name, gradient in step.gradients.items():
        mine = other.gradients[name]
        assert (mine is None) == (gradient is None), name
        if mine is not None and gradient is not None:
            most = float(gradient.abs().max()) or 1.0
            found.append(float((mine - gradient).abs().max()) / most)
    return max(found)


def test_the_graph_that_is_left() -> None:
    """The result keeps its name; what is new is called as in a trace."""
    _, trace = traced(nanogpt)
    texts = [str(node) for node in fused(trace.graph).nodes]
    at = next(n for n, text in enumerate(texts) if ATTENTION in text)
    assert texts[at - 1 : at + 1] == [
        "logical_not/0 = aten.logical_not.default(unsqueeze/1) -> bool[1, 1, 6, 6]",
        "matmul/1 = aten.scaled_dot_product_attention.default(transpose/0, transpose/1, "
        "transpose/2, logical_not/0, 0.0, False, scale=0.35355339059327373) "
        "-> float32[b, 4, 6, 8]",
    ]


def test_a_scale_is_what_its_dtype_has_of_it() -> None:
    def twice(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * torch.full((), 2.7, dtype=torch.int64)).softmax(-1) @ v

    (found,) = attentions(traced(twice)[1].graph)
    assert found.scores.scale == 2


def test_dropout_is_the_ops_own() -> None:
    """It draws from the stream of the node that it was, and as many numbers here: of the weights of
    a query without keys, too."""

    def dropped(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = m.later.clone()
        hidden[1] = True
        scores = (q @ k.mT * SCALE).masked_fill(hidden, -1e9)
        return F.dropout(scores.softmax(-1), 0.25) @ v

    model, trace = traced(dropped)
    made = replace(trace, graph=fused(trace.graph))
    (node,) = (node for node in made.graph.nodes if node.op == ATTENTION)
    assert arguments(node)["dropout_p"] == 0.25 and node.stream == "dropout/0"
    steps = [staged_step(model, each, inputs(4), [], 2, seeded=True) for each in (trace, made)]
    assert off(*steps) < 1e-6


def test_groups_of_heads_read_their_keys_unrepeated_in_16_bits() -> None:
    """In fp32 and beside a mask kernels of GPUs take no groups."""

    def groups(attend: Attend, dtype: torch.dtype) -> list[bool]:
        model = Model(attend).to(dtype)
        batch = lambda rows: {"x": inputs(rows)["x"].to(dtype)}  # noqa: E731
        graph = fused(trace_model(model, batch).graph)
        return [arguments(node)["enable_gqa"] for node in graph.nodes if node.op == ATTENTION]

    def by_the_op(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (heads(part) for part in m.few(m.x).split(WIDTH // 2, -1))
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def masked(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (heads(part) for part in m.few(m.x).split(WIDTH // 2, -1))
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~m.later)

    def in_turn(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Heads of keys k0 k1 k0 k1: the first two heads of queries share none."""
        k, v = (heads(part) for part in m.few(m.x).split(WIDTH // 2, -1))
        k, v = (
            part[:, None].expand(-1, 2, -1, -1, -1).reshape(-1, HEADS, LENGTH, SIZE)
            for part in (k, v)
        )
        return plain(m, q, k, v)

    def without_gradient(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (heads(part) for part in m.few(m.x).split(WIDTH // 2, -1))
        with torch.no_grad():
            k = k.repeat_interleave(2, dim=1)
        return plain(m, q, k, v.repeat_interleave(2, dim=1))

    def turned_later(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A part of each repeated key is changed in place, as partial rotary embeddings do."""
        k, v = (heads(part) for part in m.few(m.x).split(WIDTH // 2, -1))
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        k[..., : SIZE // 2].mul_(2)
        return plain(m, q, k, v)

    assert groups(grouped, torch.bfloat16) == [True]
    assert groups(masked, torch.bfloat16) == [False]
    assert groups(in_turn, torch.bfloat16) == [False]
    assert groups(turned_later, torch.bfloat16) == [False]
    assert groups(without_gradient, torch.bfloat16) == [False]
    if LONG:
        assert groups(by_the_op, torch.bfloat16) == [True]
        assert groups(grouped, torch.float32) == [False]


# What has to stay


def read_twice(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A penalty of sharp weights."""
    weights = (q @ k.mT * SCALE).softmax(-1)
    return weights @ v + weights.square().mean()


def learnt_bias(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """T5's: kernels give a mask no gradient."""
    return (q @ k.mT * SCALE + m.slopes).softmax(-1) @ v


def not_so_low(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).masked_fill(m.later, -100.0).softmax(-1) @ v


def lowest_added(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers has it. A query without keys gives its scores a gradient here."""
    mask = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(m.later, torch.finfo(torch.float32).min)
    return F.softmax(torch.matmul(q, k.transpose(2, 3)) * SCALE + mask, -1) @ v


def alibi(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bias, of which nobody knows that it has no -1e9."""
    return (m.drawn + (q * SCALE) @ k.mT).softmax(-1) @ v


def two_masks(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE + m.drawn).masked_fill(m.later, -torch.inf).softmax(-1) @ v


def scaled_after(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT + m.drawn) * SCALE).softmax(-1) @ v


def in_steps(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A quotient without what is behind its point."""
    return torch.div(q @ k.mT, 4.0, rounding_mode="floor").softmax(-1) @ v


def over_queries(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).softmax(-2) @ v


def capped(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gemma 2's soft cap."""
    return (torch.tanh(q @ k.mT * SCALE) * 5.0).softmax(-1) @ v


def keys_as_they_are(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A product with something that was not turned."""
    return (q @ k[..., :LENGTH, :].reshape(-1, HEADS, SIZE, LENGTH)).softmax(-1) @ v


def values_first(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (v.mT @ (q @ k.mT * SCALE).softmax(-1)).mT


def routed(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A router's softmax, of a product with a weight."""
    return (v @ m.slopes.view(1, 1, 1, HEADS).expand(-1, -1, SIZE, -1)).softmax(-1) @ v[..., :4, :]


def keys_without_gradient(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        turned = k.mT
    return (q @ turned * SCALE).softmax(-1) @ v


def dropped_twice(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(F.dropout((q @ k.mT * SCALE).softmax(-1), 0.5), 0.5) @ v


def whole_scores(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).int().float().softmax(-1) @ v


def whole_weights(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).int().float() @ v


def unlike_keys(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The smallest product weighs most."""
    return (q @ k.mT * -SCALE).softmax(-1) @ v


def of_a_number(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax of no dims, which is 1."""
    return m.slopes.sum().softmax(0) * v


def nearly_masked(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of zeros and minus infinities, but for what was written into it before."""
    mask = torch.zeros(LENGTH, LENGTH)
    mask[2] = -1e9
    return (q @ k.mT * SCALE + mask.masked_fill(m.later, -torch.inf)).softmax(-1) @ v


def scale_set_later(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = torch.full((), 1.0)
    scale.view(()).mul_(SCALE)
    return (q @ k.mT * scale).softmax(-1) @ v


def in_two_steps(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights that are values, too."""
    weights = (q @ k.mT * SCALE).softmax(-1)
    return (weights @ weights)[..., :1] * v


STAYS = [read_twice, learnt_bias, not_so_low, two_masks, scaled_after, in_steps, over_queries]
STAYS += [capped, keys_as_they_are, values_first, routed, lowest_added, alibi]
STAYS += [keys_without_gradient, dropped_twice, whole_scores, whole_weights, unlike_keys]
STAYS += [of_a_number, nearly_masked, scale_set_later, in_two_steps]


@pytest.mark.sweep(of=5)
@pytest.mark.parametrize("attend", STAYS, ids=lambda attend: attend.__name__)
def test_stays_as_it_is(attend: Attend) -> None:
    _, trace = traced(attend)
    assert attentions(trace.graph) == () and fused(trace.graph) is trace.graph


# In a plan


class Block(nn.Module):
    """A block that writes its attention out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in self.inner(x).split(WIDTH, -1))
        y = (q @ k.transpose(-2, -1) * SCALE).softmax(-1) @ v
        return x + self.outer(y.transpose(1, 2).reshape(x.shape))


def planned(block: Callable[[], nn.Module] = Block, **options: Any) -> Plan:
    """Four blocks on two processes."""
    model, batch = nn.Sequential(*(block() for _ in range(4))), {"input": torch.randn(8, 64, WIDTH)}
    return autopipe.plan(model, batch, loss=squares, cluster=machine(2), pp=2, **options)


def squares(y: Tensor, batch: Any) -> Tensor:
    return y.square().mean()


@pytest.mark.long
def test_compiled_stages_are_planned_and_cut_with_it() -> None:
    """A run knows the model by the graph as traced, and fuses what the plan says."""
    compiled, other = planned(compile=True), planned()
    assert compiled.fused_attention and not other.fused_attention
    assert compiled.fingerprint == other.fingerprint
    assert "attention" in dict(facts.decided(compiled))
    held = [plan.stages[0].predicted.memory.activations for plan in (compiled, other)]
    scores = HEADS * 64 * 64 * 4
    assert held[0] + 2 * scores < held[1]  # of each block's scores those after the softmax, a row


@pytest.mark.long
def test_it_is_done_or_left_as_it_is_asked_for() -> None:
    assert not planned(compile=True, fuse_attention=False).fused_attention
    assert planned(fuse_attention=True).fused_attention
    with pytest.raises(AutopipeError, match="fuse_attention was asked for, and the model writes"):
        planned(lambda: nn.Linear(WIDTH, WIDTH), fuse_attention=True)
