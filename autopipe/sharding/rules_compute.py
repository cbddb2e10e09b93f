"""Sharding rules for ops that compute along dims: sums, products, norms, attention, losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from autopipe.ir.graph import Value, values_in
from autopipe.ir.op_costs import GROUPED
from autopipe.planfile.placements import I, P, Placement, S
from autopipe.sharding.op import Op, Rule, Strategy, but, of_any
from autopipe.util.registry import entering

LAYERS: dict[str, Rule] = {}
"""The rule of each op, by name."""

rule = entering(LAYERS)


@rule("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "glu")
def along(op: Op) -> Iterator[Strategy]:
    """The dim along which the op computes stays whole."""
    yield from but(op, {op.dim(of=op.inputs[0])})


@rule("mean", "sum")
def reduce(op: Op) -> Iterator[Strategy]:
    """Each rank sums its shard, which gives a partial sum; dims that remain keep their shards."""
    x = op.inputs[0]
    rank = max(len(op.shape(x)), 1)  # a scalar has a dim 0 here, as for torch
    dims = {dim % rank for dim in op.arguments.get("dim") or range(rank)}
    for placement in op.shards(x):
        if placement.dim not in dims:
            before = sum(dim < placement.dim for dim in dims)
            moved = placement.dim if op.arguments.get("keepdim") else placement.dim - before
            yield Strategy({x: placement}, S(moved, placement.segments))
        elif op.carries and op.model.divides(x, placement):
            yield Strategy({x: placement}, P)
    if op.carries:
        yield Strategy({x: P}, P)


@rule("linear")
def linear(op: Op) -> Iterator[Strategy]:
    """x [..., k] with w [n, k] gives [..., n]: sharded by columns, by k, or by the rows of x.

    With a vector w [k], too small to be worth it, it is replicated; with a bias that is not one
    number a column, too.
    """
    w, bias = op["weight"], op["bias"]
    if len(op.shape(w)) == 2 and (bias is None or len(op.shape(bias)) == 1):
        yield from _product(op, op["input"], w, 1, 0, bias)


@rule("addmm")
def addmm(op: Op) -> Iterator[Strategy]:
    """b + x w, with w [k, n]."""
    if op["beta"] == 1 and op["alpha"] == 1 and len(op.shape(op["self"])) == 1:
        yield from _product(op, op["mat1"], op["mat2"], 0, 1, op["self"])


@rule("mm", "bmm", "matmul")
def matmul(op: Op) -> Iterator[Strategy]:
    """[..., m, k] x [..., k, n] gives [..., m, n]; dims in front of both are of a batch."""
    x, w = operands(op)
    rank = len(op.shape(w))
    if min(len(op.shape(x)), rank) >= 2:
        yield from _product(op, x, w, rank - 2, rank - 1, None)


@rule(*GROUPED)
def grouped(op: Op) -> Iterator[Strategy]:
    """x [t, k] in groups of rows, each with its own of w [experts, k, n], gives [t, n].

    Sharded by columns or by k. Rows and experts stay whole: how many rows a group has is data.
    """
    x, w = operands(op)
    if (len(op.shape(x)), len(op.shape(w))) != (2, 3) or op.arguments.get("bias") is not None:
        return
    for placement in op.shards(w):
        segments = placement.segments
        if placement.dim == 2:
            yield Strategy({w: placement}, S(1, segments))
        elif placement.dim == 1 and op.carries:
            yield Strategy({x: S(1, segments), w: placement}, P)
    for placement in op.shards(x):
        if placement.dim == 1 and op.carries:
            yield Strategy({x: placement, w: S(1, placement.segments)}, P)
    if x in op.model.carrying:
        yield Strategy({x: P}, P)


def operands(op: Op) -> tuple[Value, Value]:
    """Both tensors of a product."""
    x, w = values_in(op.node.args[:2])
    return x, w


def _product(op: Op, x: Any, w: Any, inner: int, outer: int, bias: Any) -> Iterator[Strategy]:
    """The strategies of a product whose weight has k at dim `inner` and n at dim `outer`.

    A bias is added once: sharded with the columns, or a partial summand on each rank.
    """
    if x == w:
        return
    last, offset = len(op.shape(x)) - 1, len(op.made) - len(op.shape(x))
    paired = len(op.shape(x)) == len(op.shape(w)) == len(op.made) > 2

    def with_bias(lie: Placement | None) -> dict[Value, Placement]:
        return {} if bias is None else {bias: op.free(bias) if lie is None else lie}

    for placement in op.shards(w):
        segments = placement.segments
        if placement.dim == outer:
            columns = S(len(op.made) - 1, segments)
            yield Strategy({w: placement} | with_bias(S(0, segments)), columns)
        elif placement.dim == inner:
            if op.carries:
                yield Strategy({x: S(last, segments), w: placement} | with_bias(P), P)
        elif paired:
            yield Strategy({x: placement, w: placement}, placement)
    for placement in op.shards(x):
        segments = placement.segments
        if placement.dim == last:
            if op.carries:
                yield Strategy({x: placement, w: S(inner, segments)} | with_bias(P), P)
        elif len(op.shape(w)) == 2 or placement.dim == last - 1:
            yield Strategy({x: placement}, S(placement.dim + offset, segments))
        elif paired and op.shape(w)[placement.dim] == op.shape(x)[placement.dim]:
            yield Strategy({x: placement, w: placement}, placement)
    if x in op.model.carrying:
        yield Strategy({x: P} | with_bias(P), P)


@rule("conv1d", "conv2d", "conv3d")
def convolution(op: Op) -> Iterator[Strategy]:
    """Weight [out, in / groups, ...]: channels are sharded like columns and rows of a linear layer.

    Groups are independent convolutions: each rank can have some of them.
    """
    x, w, bias = op["input"], op["weight"], op["bias"]
    if len(op.shape(x)) != len(op.shape(w)):
        return  # a single example, without a batch

    def with_bias(lie: Placement) -> dict[Value, Placement]:
        return {} if bias is None else {bias: lie}

    if op["groups"] != 1:
        if op["groups"] % op.model.ranks == 0:
            yield Strategy({x: S(1), w: S(0)} | with_bias(S(0)), S(1))
        return
    for placement in op.shards(w):
        if placement.dim == 0:
            segments = placement.segments
            yield Strategy({w: placement} | with_bias(S(0, segments)), S(1, segments))
        elif placement.dim == 1 and op.carries:
            yield Strategy({x: placement, w: placement} | with_bias(P), P)


# Layers


@rule("embedding")
def embedding(op: Op) -> Iterator[Strategy]:
    """Shards of columns, of the vocabulary (words of other ranks give zeros), or of the indices.

    A gradient that is divided by how often each word occurs needs all words and all indices.
    """
    w, ids, apart = op["weight"], op["indices"], not op["scale_grad_by_freq"]
    for placement in op.shards(w):
        if placement.dim == 1:
            yield Strategy({w: placement}, S(len(op.made) - 1, placement.segments))
        elif placement.segments == 1 and w in op.model.carrying and apart:
            yield Strategy({w: placement}, P)
    for placement in op.shards(ids) if apart else ():
        yield Strategy({ids: placement}, placement)


@rule("layer_norm", "rms_norm")
def normalize(op: Op) -> Iterator[Strategy]:
    """The normalized dims stay whole."""
    rank = len(op.made)
    yield from but(op, range(rank - len(op["normalized_shape"]), rank))


@rule("scaled_dot_product_attention")
def attention(op: Op) -> Iterator[Strategy]:
    """Shards of heads or rows of queries, keys and values; the mask is sharded with them.

    Of queries [b, h, s, d] with keys [h, s, d] a dim's number means two things: they stay whole.
    """
    query, key, value, mask = op["query"], op["key"], op["value"], op["attn_mask"]
    rank = len(op.made)
    if any(len(op.shape(x)) != rank for x in (query, key, value)):
        return
    for placement in of_any(op):
        lie = dict.fromkeys((query, key, value), placement)
        if placement.dim >= rank - 2 or not all(op.model.divides(x, placement) for x in lie):
            continue
        if mask is not None:
            dim = op.aligned(mask, placement.dim)
            lie[mask] = op.free(mask) if dim is None else S(dim, placement.segments)
        yield Strategy(lie, placement)


@rule("cross_entropy_loss")
def cross_entropy(op: Op) -> Iterator[Strategy]:
    """Shards of the classes: three small all-reduces instead of gathering all logits.

    Labels of bytes, which torch takes too, are replicated: no op gathers by them.
    """
    x, target = op["self"], op["target"]
    plain = op["weight"] is None and op["label_smoothing"] == 0 and op["reduction"] != 0
    labels = len(op.shape(target)) == 1 and op.model.graph.spec(target).dtype == torch.int64
    if plain and len(op.shape(x)) == 2 and labels:
        for placement in op.shards(x):
            if placement.dim == 1 and placement.segments == 1:
                yield Strategy({x: placement, target: I}, I)


@rule("vocabulary_loss")
def vocabulary_loss(op: Op) -> Iterator[Strategy]:
    """Shards of the words, whose columns the op itself puts together."""
    x, w, bias, target = (op[name] for name in ("x", "weight", "bias", "target"))
    for placement in op.shards(w):
        if placement.dim == 0 and placement.segments == 1:
            own = {w: placement} if bias is None else {w: placement, bias: placement}
            yield Strategy({x: op.free(x), target: I} | own, I)
