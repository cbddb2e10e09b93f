"""Convert tensors between placements by torch ops that autograd, make_fx and torch.compile support.

    convert(x, "tp", "P", "I")        an all-reduce; its gradient stays as it is
    convert(x, "tp", "S(1)", "R")     an all-gather; its gradient is reduce-scattered

The gradient of a conversion from a to b is the conversion from b's dual to a's dual. So there is
one op, which is its own derivative.

Ops name an axis; each process binds the name to its ranks once (`bind`). On fake tensors nothing is
sent; only the number of ranks and the own rank are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from autopipe.planfile.placements import OwnRows, Placement, parse, part, pieces_of

TENSOR_PARALLEL = "tp"
"""The name of the tensor-parallel axis."""


class Axis(Protocol):
    """The collectives over the ranks of a mesh axis, called by one of these ranks."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def rank(self) -> int:
        """The index of this rank in the axis, from 0."""

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """Reduce `x` by `op` ("sum" or "max") over the ranks, in place or into a new tensor."""

    def begin_all_reduce(self, x: Tensor) -> Callable[[], None]:
        """Begin to sum `x` in place over the ranks; the returned handle waits for the end."""

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Gather the flat tensors of all ranks, which have `sizes` elements."""

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Sum each of the flat `parts` over the ranks, and return the part of this rank."""

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send flat part i to rank i; return the parts for this rank, with `sizes` elements."""


_axes: dict[str, Any] = {}


@contextmanager
def bind(name: str, axis: Axis | Planned) -> Iterator[None]:
    """Within, ops find `axis` under `name`."""
    before = _axes.get(name)
    _axes[name] = axis
    try:
        yield
    finally:
        if before is None:
            del _axes[name]
        else:
            _axes[name] = before


def attach(name: str, axis: Axis) -> None:
    """Bind `name` to `axis` for the life of this process, which is one of its ranks."""
    _axes[name] = axis


class Planned(NamedTuple):
    """An axis for fake tensors: it has a size and a rank, and sends nothing."""

    size: int
    rank: int


def axis_of(name: str) -> Axis:
    """The axis that is bound to `name`."""
    axis: Axis = _axes[name]
    return axis


@lru_cache
def _placement(text: str) -> Placement:
    return parse(text)


CONVERT = "autopipe.convert.default"
"""The name of the conversion op in a graph."""

_DUALS = {"I": "I", "R": "P", "P": "R"}


def _dual(text: str) -> str:
    return _DUALS.get(text, text)


@torch.library.custom_op("autopipe::convert", mutates_args=())
def convert(x: Tensor, axis: str, source: str, target: str, size: int) -> Tensor:
    """Convert a tensor from placement `source` to `target` (table in `planfile.placements`).

    Args:
        x: this rank's part of the tensor.
        size: the whole size of the dim that `source` shards; 0 if it shards none.

    Returns:
        A new tensor, in dense rows whatever the strides of `x`, as the fake kernel promises.
    """
    before, after, ranks = _placement(source), _placement(target), axis_of(axis)
    if before.sharded and after.sharded:
        return _exchanged(x, ranks, before, after, size)
    if before.sharded:
        if after.kind == "P":
            return _padded(x, ranks, before, size)
        return _gathered(x, ranks, before, size)
    if before.kind == "P" and after.sharded:
        sums = ranks.reduce_scatter(
            [own_part(x, after, ranks.size, rank).reshape(-1) for rank in range(ranks.size)]
        )
        return sums.view(_shape(x, after, ranks.size, ranks.rank))
    if before.kind == "P":
        return ranks.all_reduce(x.contiguous().clone(), "sum")
    if after.sharded:
        return own_part(x, after, ranks.size, ranks.rank).contiguous().clone()
    if after.kind == "P":
        return (x / ranks.size).contiguous()
    return x.clone(memory_format=torch.contiguous_format)


@convert.register_fake
def _(x: Tensor, axis: str, source: str, target: str, size: int) -> Tensor:
    before, after, ranks = _placement(source), _placement(target), axis_of(axis)
    shape = list(x.shape)
    if before.sharded:
        shape[before.dim] = size
    if after.sharded:
        whole = shape[after.dim]
        shape[after.dim] = sum(n for _, n in pieces_of(whole, after, ranks.size, ranks.rank))
    return x.new_empty(shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.axis, ctx.source, ctx.target, size = inputs
    after = _placement(ctx.target)
    ctx.size = 0
    if after.sharded:
        before = _placement(ctx.source)
        same = before.sharded and before.dim == after.dim
        ctx.size = size if same else x.shape[after.dim]


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    source, target = _dual(ctx.target), _dual(ctx.source)
    return convert(gradient, ctx.axis, source, target, ctx.size), None, None, None, None


convert.register_autograd(_back, setup_context=_remember)


@torch.library.custom_op("autopipe::largest", mutates_args=())
def largest(x: Tensor, axis: str) -> Tensor:
    """The elementwise maximum of `x` over the ranks; it has no gradient."""
    return axis_of(axis).all_reduce(x.contiguous().clone(), "max")


@largest.register_fake
def _(x: Tensor, axis: str) -> Tensor:
    return x.new_empty(x.shape)


def whole(x: Tensor, axis: str, placement: Placement) -> Tensor:
    """Assemble a tensor of which each rank has a part; every rank must call it."""
    if placement.segments == 1:  # the parts may be unequal
        own = torch.tensor(x.shape[placement.dim], dtype=torch.int64, device=x.device)
        size = int(axis_of(axis).all_reduce(own, "sum"))
    else:
        size = x.shape[placement.dim] * axis_of(axis).size
    return _gathered(x, axis_of(axis), placement, size)


def _shape(x: Tensor, placement: Placement, ranks: int, rank: int) -> list[int]:
    shape = list(x.shape)
    pieces = pieces_of(shape[placement.dim], placement, ranks, rank)
    shape[placement.dim] = sum(length for _, length in pieces)
    return shape


def in_rows(whole: Tensor, rows: OwnRows) -> Tensor:
    """A view of some rows of a tensor; a scalar is one row."""
    return (whole if whole.ndim else whole.view(1)).narrow(rows.dim, rows.first, rows.length)


def own_part(x: Tensor, placement: Placement, ranks: int, rank: int) -> Tensor:
    """A rank's part of a whole tensor: a view if possible, else a copy."""
    dim, segments = placement.dim, placement.segments
    if isinstance(segments, int):
        if segments == 1:
            return x.narrow(dim, *part(x.shape[dim], ranks, rank))
        split = torch.unflatten(x, dim, (segments, -1))
        own = split.narrow(dim + 1, *part(split.shape[dim + 1], ranks, rank))
        return own.flatten(dim, dim + 1)
    pieces = pieces_of(x.shape[dim], placement, ranks, rank)
    return torch.cat([x.narrow(dim, *piece) for piece in pieces], dim)


def together(parts: Sequence[Tensor], placement: Placement, size: int) -> Tensor:
    """Assemble the whole tensor from the parts of all ranks."""
    dim, segments, ranks = placement.dim, placement.segments, len(parts)
    if segments == 1:
        return torch.cat(list(parts), dim)
    if isinstance(segments, int):
        split = [torch.unflatten(x, dim, (segments, -1)) for x in parts]
        return torch.cat(split, dim + 1).flatten(dim, dim + 1)
    pieces = [
        torch.split(x, [n for _, n in pieces_of(size, placement, ranks, rank)], dim)
        for rank, x in enumerate(parts)
    ]
    return torch.cat([piece for segment in zip(*pieces, strict=True) for piece in segment], dim)


def _gathered(x: Tensor, ranks: Axis, placement: Placement, size: int) -> Tensor:
    shapes = _shapes_of_all(x, ranks, placement, size)
    sizes = [_count(shape) for shape in shapes]
    parts = ranks.all_gather(x.reshape(-1), sizes)
    views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return together(views, placement, size)


def _shapes_of_all(x: Tensor, ranks: Axis, placement: Placement, size: int) -> list[list[int]]:
    shapes = []
    for rank in range(ranks.size):
        shape = list(x.shape)
        shape[placement.dim] = sum(n for _, n in pieces_of(size, placement, ranks.size, rank))
        shapes.append(shape)
    return shapes


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _padded(x: Tensor, ranks: Axis, placement: Placement, size: int) -> Tensor:
    shape = list(x.shape)
    shape[placement.dim] = size
    whole = x.new_zeros(shape)
    at = 0
    for begin, length in pieces_of(size, placement, ranks.size, ranks.rank):
        own = x.narrow(placement.dim, at, length)
        whole.narrow(placement.dim, begin, length).copy_(own)
        at += length
    return whole


def _exchanged(x: Tensor, ranks: Axis, before: Placement, after: Placement, size: int) -> Tensor:
    """Convert shards of one dim to shards of another, or to other segments of the same dim."""
    if before.dim == after.dim:
        whole = _gathered(x, ranks, before, size)
        return own_part(whole, after, ranks.size, ranks.rank).contiguous().clone()
    shapes = _shapes_of_all(x, ranks, before, size)
    part_shapes = [
        _shape(torch.empty(shape, device="meta"), after, ranks.size, ranks.rank) for shape in shapes
    ]
    sent = [own_part(x, after, ranks.size, rank).reshape(-1) for rank in range(ranks.size)]
    parts = ranks.all_to_all(sent, [_count(shape) for shape in part_shapes])
    views = [part.view(shape) for part, shape in zip(parts, part_shapes, strict=True)]
    return together(views, before, size)
