"""Sharding rules for ops that move, pick or repeat elements: a shard follows its elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autopipe.ir.graph import Value, values_in
from autopipe.planfile.placements import P, Placement, S, through_view
from autopipe.sharding.op import Op, Rule, Strategy, but, of_any
from autopipe.util.registry import entering

SHAPES: dict[str, Rule] = {}
"""The rule of each op, by name."""

rule = entering(SHAPES)


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze")
def view(op: Op) -> Iterator[Strategy]:
    """A shard is kept if its elements are in one dim of the result.

    Bits that are read as another dtype are no elements: `x.view(torch.int32)`.
    """
    if op.node.op == "aten.view.dtype":
        return
    (x,) = op.inputs
    for placement in op.shards(x):
        target = through_view(
            op.shape(x), op.made, placement.dim, placement.segments, op.model.ranks
        )
        if target is not None:
            yield Strategy({x: placement}, target)
    if op.carries:
        yield Strategy({x: P}, P)


def permutation(op: Op) -> list[int]:
    """For each dim of the result, the dim of the input."""
    rank = len(op.made)
    if op.name == "permute":
        return [dim % rank for dim in op["dims"]]
    order = list(range(rank))
    if op.name == "transpose" and order:  # torch takes a scalar, too
        a, b = op.dim("dim0"), op.dim("dim1")
        order[a], order[b] = order[b], order[a]
        return order
    return order[::-1]  # t, numpy_T


@rule("transpose", "permute", "t", "numpy_T")
def permute(op: Op) -> Iterator[Strategy]:
    """A shard's dim moves with the permutation."""
    (x,), order = op.inputs, permutation(op)
    for placement in op.shards(x):
        yield Strategy({x: placement}, S(order.index(placement.dim), placement.segments))
    if op.carries:
        yield Strategy({x: P}, P)


@rule("expand")
def expand(op: Op) -> Iterator[Strategy]:
    """Dims that are not expanded keep their shards."""
    x = op.inputs[0]
    offset = len(op.made) - len(op.shape(x))
    for placement in op.shards(x):
        if op.made[placement.dim + offset] == op.shape(x)[placement.dim]:
            yield Strategy({x: placement}, S(placement.dim + offset, placement.segments))


@rule("split", "split_with_sizes", "chunk")
def split(op: Op) -> Iterator[Strategy]:
    """Of a fused dim each rank has a part of every piece: the pieces are its segments."""
    (x,) = op.inputs
    dim = op.dim(of=x)
    for placement in op.shards(x):
        if placement.dim != dim:
            yield Strategy({x: placement}, placement)
        elif placement.segments == S(dim, pieces(op, dim)).segments:
            yield Strategy({x: placement}, S(dim))


def pieces(op: Op, dim: int) -> tuple[int, ...]:
    """The lengths into which a dim is split."""
    return tuple(op.model.shape(output)[dim] for output in op.outputs)


@rule("slice")
def slice_(op: Op) -> Iterator[Strategy]:
    """Shards of any other dim, or a slice of exactly one segment of this dim."""
    (x,) = op.inputs
    dim = op.dim(of=x)
    for placement in op.shards(x):
        if placement.dim != dim or op.made[dim] == op.shape(x)[dim]:
            yield Strategy({x: placement}, placement)
        elif segment_of(op, x, dim, placement) is not None:
            yield Strategy({x: placement}, S(dim))


def segment_of(op: Op, x: Value, dim: int, placement: Placement) -> int | None:
    """The number of the segment that a slice takes, or None where it takes something else."""
    begin, end = bounds(op, x, dim)
    at = 0
    for number, length in enumerate(_few_lengths(op.shape(x)[dim], placement)):
        if (begin, end) == (at, at + length):
            return number
        at += length
    return None


def bounds(op: Op, x: Value, dim: int) -> tuple[int, int]:
    """The begin and end of a slice; (0, 0) if its step is not 1."""
    size = op.shape(x)[dim]

    def inside(given: Any, default: int) -> int:
        at = default if given is None else op.model.size(given)
        return min(max(at + size if at < 0 else at, 0), size)

    if op["step"] != 1:
        return 0, 0
    return inside(op["start"], 0), inside(op["end"], size)


def _few_lengths(size: int, placement: Placement) -> Sequence[int]:
    if isinstance(placement.segments, tuple):
        return placement.segments
    few = placement.segments if placement.segments <= 64 else 0
    return (size // placement.segments,) * few


@rule("select", "unbind")
def select(op: Op) -> Iterator[Strategy]:
    """The selected dim stays whole; later dims move up by one."""
    (x,) = op.inputs
    dim = op.dim(of=x)
    for placement in op.shards(x):
        if placement.dim != dim:
            moved = placement.dim - (placement.dim > dim)
            yield Strategy({x: placement}, S(moved, placement.segments))


@rule("type_as")
def type_as(op: Op) -> Iterator[Strategy]:
    """The first tensor keeps its shards; the second one, however sharded, gives its dtype.

    Summands that become integers are no longer summands of x.
    """
    x, other = op["self"], op["other"]
    of_x = [op.free(x), *op.shards(x), *([P] if op.carries and x in op.model.carrying else ())]
    for of_other in (op.free(other), *op.shards(other)):
        yield from (Strategy({other: of_other, x: placement}, placement) for placement in of_x)


@rule("cat")
def cat(op: Op) -> Iterator[Strategy]:
    """Shards of any other dim; or the pieces become segments of this dim.

    A tensor of shape (0,) is no piece: torch ignores it, whatever the others' shapes are.
    """
    dim = op.dim()
    pieces = [x for x in values_in(op["tensors"]) if op.shape(x) != (0,)]
    for placement in of_any(op):
        if placement.dim != dim:
            yield Strategy(dict.fromkeys(pieces, placement), placement)
        elif placement.segments == 1 and all(op.model.divides(x, placement) for x in pieces):
            sizes = tuple(op.shape(x)[dim] for x in pieces)
            yield Strategy(dict.fromkeys(pieces, placement), S(dim, sizes))


@rule("stack")
def stack(op: Op) -> Iterator[Strategy]:
    """The new dim stays whole; the dims from it on move down by one."""
    for placement in of_any(op):
        moved = placement.dim + (placement.dim >= op.dim())
        yield Strategy(dict.fromkeys(op.inputs, placement), S(moved, placement.segments))


@rule("pad", "constant_pad_nd")
def pad(op: Op) -> Iterator[Strategy]:
    """A padded dim stays whole; the list of amounts begins with the last dim's."""
    amounts = tuple(op["pad"])
    yield from but(op, {len(op.made) - 1 - n // 2 for n, by in enumerate(amounts) if by != 0})


@rule("roll", "flip")
def turn(op: Op) -> Iterator[Strategy]:
    """The flipped or rolled dims stay whole; all dims if none is named."""
    rank = max(len(op.made), 1)  # a scalar has a dim 0 here, as for torch
    yield from but(op, {dim % rank for dim in op["dims"]} or range(rank))


@rule("repeat")
def repeat(op: Op) -> Iterator[Strategy]:
    """Dims that are not repeated keep their shards."""
    (x,) = op.inputs
    offset = len(op.made) - len(op.shape(x))
    for placement in op.shards(x):
        if op["repeats"][placement.dim + offset] == 1:
            yield Strategy({x: placement}, S(placement.dim + offset, placement.segments))


@rule("repeat_interleave")
def repeat_interleave(op: Op) -> Iterator[Strategy]:
    """Each element is repeated in place, so a rank's part of the result comes from its own part."""
    if len(op.inputs) == 1 and op.arguments.get("dim") is not None:
        (x,) = op.inputs
        for placement in op.shards(x):
            if (
                placement.dim != op.dim()
                or placement.segments == 1
                and op.model.divides(x, placement)
            ):
                yield Strategy({x: placement}, placement)


@rule("index")
def index(op: Op) -> Iterator[Strategy]:
    """A vector of positions picks from one dim; the other dims keep their shards."""
    positions = op["indices"]
    given = [dim for dim, at in enumerate(positions) if at is not None]
    if len(given) == 1 and len(op.shape(positions[given[0]])) == 1:
        yield from but(op, given)
        if op.carries:
            yield Strategy({op.inputs[0]: P}, P)
