"""How a tensor lies over the ranks of an axis: four states, each of the value AND the gradient.

    state    value             gradient          dual
    I        replicated        replicated        I
    R        replicated        partial sum       P
    P        partial sum       replicated        R
    S(d)     shard of dim d    shard of dim d    S(d)

A gradient lies as the dual of its value. Ranks exchange something only where a tensor goes from one
state into another; what the conversion does to the gradient is its dual, read from right to left:

             to I                  to R                to P            to S
    from I   -                     - | all-reduce      x 1/n | -       slice | all-gather
    from R   - | x 1/n             -                   none            slice | zero-pad
    from P   all-reduce | -        all-reduce, both    -               reduce-scatter | all-gather
    from S   all-gather | slice    all-gather |        none            all-to-all, both
                                     reduce-scatter

(value | gradient; - leaves it as it is.) I to R and P to I are f and g of Megatron-LM (Shoeybi et
al., 2019, arXiv:1909.08053, section 3); P to S and S to R are those of sequence parallelism
(Korthikanti et al., 2022, arXiv:2205.05198, section 4.2.2). The four states are those that types of
SPMD programs have come to elsewhere: the "varying" and "invariant" of JAX's shard_map with their
partial sums.

Any op is right if all its tensors are I. It is right with R alone if its backward is linear in the
gradient: torch's ops are, a user's Function need not be (`sharding.strategies`).

**Segments.** A fused weight is several matrices in one: rows of q, k and v. S(0, 3) has three equal
segments, and each rank a part of each; S(0, 8+2+2) has segments of these lengths.

    S(0)       r0 r0 r0 r0 r0 r0 | r1 r1 r1 r1 r1 r1
    S(0, 3)    r0 r0 | r1 r1 | r0 r0 | r1 r1 | r0 r0 | r1 r1

**The rows of a micro-batch** are a symbol in a graph. Rules ask what divides what, so `BIG`, a
large prime, stands for it: what divides a multiple of it as a number does so as a formula.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from autopipe.cluster.cluster import Link

if TYPE_CHECKING:
    import sympy

BIG = 1_000_003
"""Stands for the rows of a micro-batch; a prime, and larger than any other factor of a size."""

Segments: TypeAlias = int | tuple[int, ...]
"""So many equal segments, or segments of these lengths."""


class Placement(NamedTuple):
    """A state: I, R, P, or S with the dim that is sharded and its segments."""

    kind: str
    dim: int = -1
    segments: Segments = 1

    @property
    def sharded(self) -> bool:
        """Whether each rank has a part of the elements only."""
        return self.kind == "S"

    def at(self, rows: int) -> Placement:
        """The placement for `rows` rows in place of `BIG`, if its segments are counted in rows."""
        if not isinstance(self.segments, int) or self.segments % BIG:
            return self
        return self._replace(segments=self.segments // BIG * rows)

    def __str__(self) -> str:
        if not self.sharded:
            return self.kind
        if isinstance(self.segments, tuple):
            return f"S({self.dim}, {'+'.join(map(str, self.segments))})"
        of_rows, rest = divmod(self.segments, BIG)
        many = "b" if of_rows == 1 else f"{of_rows}*b"
        count = self.segments if rest else many
        return f"S({self.dim})" if self.segments == 1 else f"S({self.dim}, {count})"


I = Placement("I")  # noqa: E741
R = Placement("R")
P = Placement("P")


def S(dim: int, segments: Segments = 1) -> Placement:
    """Shards of `dim`; equal lengths of segments are the same as their number."""
    if isinstance(segments, tuple) and len(set(segments)) == 1:
        segments = len(segments)
    return Placement("S", dim, segments)


def parse(text: str) -> Placement:
    """The placement that `str` wrote.

    Raises:
        ValueError: it is none.
    """
    if text in ("I", "R", "P"):
        return Placement(text)
    number = r"([1-9]\d*)"
    found = re.fullmatch(rf"S\((\d+)(?:, (?:{number}|(?:{number}\*)?(b)|(\d+(?:\+\d+)+)))?\)", text)
    if found is None:
        raise ValueError(f"{text!r} is no placement; I, R, P, S(0), S(0, 3) and S(0, 8+2+2) are")
    dim, count, times, of_rows, lengths = found.groups()
    if lengths:
        return S(int(dim), tuple(map(int, lengths.split("+"))))
    if of_rows:
        return S(int(dim), int(times or 1) * BIG)
    return S(int(dim), int(count or 1))


def lengths(size: int, segments: Segments) -> tuple[int, ...]:
    """The lengths of the segments of a dim of `size`."""
    return segments if isinstance(segments, tuple) else (size // segments,) * segments


def divides(size: int, segments: Segments, ranks: int) -> bool:
    """Whether each rank gets equally much of every segment."""
    if isinstance(segments, tuple):
        return sum(segments) == size and all(length % ranks == 0 for length in segments)
    return size % (segments * ranks) == 0


def part(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Where a rank's part of a segment begins, and its length, as `torch.chunk` has it."""
    most = -(-size // ranks)
    begin = min(rank * most, size)
    return begin, min(most, size - begin)


class OwnRows(NamedTuple):
    """What a rank has of a tensor under ZeRO: the entries [first, last) of one dim."""

    dim: int
    first: int
    last: int

    @property
    def length(self) -> int:
        """The number of entries of `dim` that the rank has."""
        return self.last - self.first

    def strided(self, shape: Sequence[int]) -> bool:
        """Whether the entries are several pieces of memory in a contiguous tensor of this shape."""
        return prod(shape[: self.dim]) > 1

    def elements(self, shape: Sequence[int]) -> int:
        """The number of elements that the rank has of a tensor of this shape."""
        return prod((*shape[: self.dim], self.length, *shape[self.dim + 1 :]))


def own_rows(shape: Sequence[int], ranks: int, rank: int) -> OwnRows:
    """A rank's rows of a tensor: entries of the first dim that has one for each rank, else of the
    first dim; a scalar is one row.

    Experts are stacked, [8, 14336, 4096]: by their first dim only 8 of 64 ranks would have any.

    >>> [own_rows((5, 2), 3, rank) for rank in range(2)]
    [OwnRows(dim=0, first=0, last=2), OwnRows(dim=0, first=2, last=4)]
    >>> own_rows((8, 14336, 4096), 64, 1)
    OwnRows(dim=1, first=224, last=448)
    """
    dim = next((dim for dim, size in enumerate(shape) if size >= ranks), 0)
    begin, count = part(shape[dim] if shape else 1, ranks, rank)
    return OwnRows(dim, begin, begin + count)


def pieces_of(size: int, placement: Placement, ranks: int, rank: int) -> list[tuple[int, int]]:
    """The starts and lengths of a rank's parts of a dim of `size` elements."""
    found, at = [], 0
    for length in lengths(size, placement.segments):
        begin, own = part(length, ranks, rank)
        found.append((at + begin, own))
        at += length
    return found


def local_size(
    size: int | sympy.Expr, segments: Segments, ranks: int, rank: int
) -> int | sympy.Expr:
    """The size of a rank's part of a dim."""
    if segments == 1 and isinstance(size, int):
        return part(size, ranks, rank)[1]
    if isinstance(size, int):
        return size // ranks
    import sympy  # half a second, which a plan that is only looked at can be spared

    return sympy.expand(size / ranks)


def through_view(
    before: Sequence[int], after: Sequence[int], dim: int, segments: Segments, ranks: int
) -> Placement | None:
    """The placement of a sharded tensor after a view of it; None: shards are in no single dim.

    A segment's part is a run of so many elements in memory. The dim of the result in which such
    runs are again parts of segments is the one:

        [2, 6, 4]  S(1)  -> [2, 24] S(1) -> [12, 4]: runs of 3 x 4 in 2 segments  S(0, 2)
    """
    size, inner = before[dim], 1
    for length in before[dim + 1 :]:
        inner *= length
    strides, stride = [0] * len(after), 1
    for axis in reversed(range(len(after))):
        strides[axis], stride = stride, stride * after[axis]
    for axis, length in enumerate(after):
        if length == size and strides[axis] == inner and length > 1:
            return S(axis, segments)
    if isinstance(segments, tuple) or size % (segments * ranks) or not stride:
        return None  # nor has a tensor without elements runs of them
    run = size // (segments * ranks) * inner
    for axis, length in enumerate(after):
        whole = length * strides[axis]
        if length > 1 and run % strides[axis] == 0 and whole % (run * ranks) == 0:
            return S(axis, whole // (run * ranks))
    return None


class Move(NamedTuple):
    """A conversion's traffic: the collective, and its share of the whole tensor's bytes.

    On a ring of n ranks (Patarasuk and Yuan, JPDC 2009) each sends and receives
    `rounds * (n - 1) / n` times the bytes in `rounds * (n - 1)` messages.
    """

    name: str
    rounds: int

    def sent(self, size: float, ranks: int) -> float:
        """Bytes that each rank sends of a tensor of `size` bytes as a whole."""
        each = self.rounds * (ranks - 1) / ranks * size
        return each / ranks if self.name == "all-to-all" else each

    def rate(self, link: Link) -> float:
        """Bytes a second at which a link carries it."""
        if self.name == "all-to-all":
            return link.bandwidth
        return link.sums if self.name == "all-reduce" else link.gathers


ALL_REDUCE = Move("all-reduce", 2)
ALL_GATHER = Move("all-gather", 1)
REDUCE_SCATTER = Move("reduce-scatter", 1)
ALL_TO_ALL = Move("all-to-all", 1)

_MOVES: dict[str, tuple[Move | None, Move | None]] = {
    "IR": (None, ALL_REDUCE),
    "IP": (None, None),
    "IS": (None, ALL_GATHER),
    "RI": (None, None),
    "RS": (None, None),
    "PI": (ALL_REDUCE, None),
    "PR": (ALL_REDUCE, ALL_REDUCE),
    "PS": (REDUCE_SCATTER, ALL_GATHER),
    "SI": (ALL_GATHER, None),
    "SR": (ALL_GATHER, REDUCE_SCATTER),
    "SS": (ALL_TO_ALL, ALL_TO_ALL),
}


def moves(
    source: Placement, target: Placement, differentiable: bool
) -> tuple[Move | None, Move | None] | None:
    """The traffic of a conversion, for the value and for the gradient; None: it does not exist.

    A value without a gradient has only one replicated state.
    """
    if source == target:
        return None, None
    found = _MOVES.get(source.kind + target.kind)
    if found is None:
        return None
    return found if differentiable else (found[0], None)


@dataclass(frozen=True)
class Sharding:
    """How a graph is sharded; states and nodes that are not listed are replicated.

    Attributes:
        states: the placement of each parameter, buffer and constant, by name.
        nodes: the strategy of each node, by name: the placements of its distinct tensor inputs, in
            order, and of its result.
    """

    ranks: int
    states: Mapping[str, Placement]
    nodes: Mapping[str, tuple[tuple[Placement, ...], Placement]]
