"""Which parts of the model's tensors a rank holds, and which of them it writes.

    whole tensor      rows 0 1 2 3 4 5 6 7                    its name and shape: the model's
    tensor parallel   S(0, 2), rank 1 of 2: 2 3 | 6 7         own tensor of 4 rows, in two pieces
    ZeRO              rows [2, 4) of these: 6 7               own tensor of 2 rows, in one piece

All follows from the plan: no rank asks another one. Several ranks may hold the same pieces, for
example the replicas under ZeRO 0. Each tensor is then assigned to one of them, largest first, so
that it is written once and the ranks write about equally many elements. Tensors that forward writes
(running statistics, a queue of keys) differ between replicas, and each replica writes its own.

In this module a tensor without dims counts as one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from autopipe.ir.graph import shape_at
from autopipe.planfile.placements import I, OwnRows, Placement, R, pieces_of
from autopipe.runtime.parameters.hold import HeldParameters
from autopipe.runtime.parameters.model_states import ModelStates, in_state_dict
from autopipe.runtime.parameters.part import RankPart

Shape = tuple[int, ...]

BESIDE = "beside"
"""The kind of a tensor that forward or the loss writes and no state dict has: in a plain attribute
of a model or a loss, or in a buffer that is not persistent."""

REPLICA = "replica"
"""The kind of a tensor that forward has written in a replica other than the first."""


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor: its first index there, that in the rank's tensor, and its shape."""

    whole: Shape
    own: Shape
    shape: Shape


@dataclass(frozen=True)
class OwnTensor:
    """A tensor as a rank holds it.

    Attributes:
        name: the tensor's name in the graph.
        aliases: the other names of a tied parameter.
        kind: "parameter", "buffer" or BESIDE.
        tensor: the rank's elements, on its device; a load changes it in place.
        shape: the shape of the whole tensor.
        pieces: the places of the rank's elements in the whole tensor; empty if it holds none.
        writes: whether this rank writes them into a checkpoint.
        moves: whether a step may change the tensor before its optimizer does.
        replica: "" or, for a tensor that forward writes in a replica other than the first,
            `replica 1 of 2`: the key under which a checkpoint has the replica's values.
    """

    name: str
    aliases: tuple[str, ...]
    kind: str
    tensor: Tensor
    shape: Shape
    pieces: tuple[Piece, ...]
    writes: bool
    moves: bool = False
    replica: str = ""

    @property
    def leads(self) -> bool:
        """Whether the rank has the first element of the whole tensor, or that has no elements."""
        return leads(self.pieces) or not prod(self.shape)

    @property
    def written(self) -> bool:
        """Whether this rank writes something of the tensor; of an empty one its name and shape."""
        return self.writes and (bool(self.pieces) or not prod(self.shape))

    def take(self, whole: Tensor) -> None:
        """Copy this rank's elements out of a whole tensor."""
        whole = whole.reshape(self.shape or (1,))
        for piece in self.pieces:
            source, target = (
                tuple(slice(b, b + n) for b, n in zip(begins, piece.shape, strict=True))
                for begins in (piece.whole, piece.own)
            )
            self.tensor[target].copy_(whole[source])


def pieces_of_rank(shape: Shape, placement: Placement, ranks: int, rank: int) -> tuple[Piece, ...]:
    """The pieces that a tensor-parallel rank has of a tensor.

    >>> [piece.whole for piece in pieces_of_rank((8,), Placement("S", 0, 2), 2, 1)]
    [(2,), (6,)]
    """
    whole = Piece((0,) * len(shape), (0,) * len(shape), shape)
    if not placement.sharded:
        return _filled([whole])
    dim, at, pieces = placement.dim, 0, []
    for begin, length in pieces_of(shape[dim], placement, ranks, rank):
        pieces.append(
            Piece(
                _with(whole.whole, dim, begin),
                _with(whole.own, dim, at),
                _with(shape, dim, length),
            )
        )
        at += length
    return _filled(pieces)


def rows_of(pieces: Iterable[Piece], rows: OwnRows) -> tuple[Piece, ...]:
    """The pieces of some rows of a rank's own tensor, cut from the tensor's pieces.

    >>> every = pieces_of_rank((8,), Placement("S", 0, 2), 2, 1)
    >>> [piece.whole for piece in rows_of(every, OwnRows(0, 2, 4))]
    [(6,)]
    """
    cut = []
    dim, first, last = rows
    for piece in pieces:
        begin = max(piece.own[dim], first)
        end = min(piece.own[dim] + piece.shape[dim], last)
        cut.append(
            Piece(
                _with(piece.whole, dim, piece.whole[dim] + begin - piece.own[dim]),
                _with(piece.own, dim, begin - first),
                _with(piece.shape, dim, max(0, end - begin)),
            )
        )
    return _filled(cut)


def own_tensors(part: RankPart, own: ModelStates, held: HeldParameters) -> dict[str, OwnTensor]:
    """This rank's tensors that a checkpoint holds, by name.

    For a parameter with an fp32 master it is the master. Constants and buffers that no state dict
    has, and that nothing writes, are left out: the model makes them.
    """
    shards, rows, mesh = held.gradients.shards(), held.gradients.rows, part.plan.mesh
    tensors: dict[str, OwnTensor] = {}
    holders: dict[str, tuple[int, ...]] = {}
    for name, spec in own.specs.items():
        alone = name in own.unused
        if name not in own.states and not alone:
            continue
        if not own.in_checkpoint(name):
            continue
        placement = own.sharding.states.get(name, I)
        shape = shape_at(spec.spec, 1) or (1,)
        cut = pieces_of_rank(shape, placement, mesh.tp, part.place.tp)
        if name in rows:
            cut = rows_of(cut, rows[name])
        tensor = own.unused[name] if alone else shards.get(name, own.states[name])
        data = tensor.detach().view(1) if tensor.ndim == 0 else tensor.detach()
        local = name in own.written and name not in rows
        dps = (part.place.dp,) if local or name in rows else range(mesh.dp)
        holders[name] = (
            (0,) if alone else _holders(part, name, placement, dps, in_rows=name in rows)
        )
        full_shape = shape_at(spec.spec, 1)
        kind = spec.kind if in_state_dict(spec) else BESIDE
        moves = kind != "parameter" or name in own.written or spec.projection is not None
        tensors[name] = OwnTensor(
            name, spec.aliases, kind, data, full_shape, cut, writes=False, moves=moves,
            replica=f"replica {part.place.dp} of {mesh.dp}" if local and part.place.dp else "",
        )  # fmt: skip
    writers = _writers(holders, tensors)
    return {
        name: OwnTensor(**{**vars(own), "writes": writers[name] == part.place.rank})
        for name, own in tensors.items()
    }


def _holders(
    part: RankPart, name: str, placement: Placement, dps: Sequence[int], *, in_rows: bool
) -> tuple[int, ...]:
    """The ranks of the replicas `dps` that hold the same elements as this rank, ascending."""
    mesh, here = part.plan.mesh, part.place
    stages = (stage for stage in part.split.stages if name in stage.states)
    pps: Sequence[int] = sorted({part.placed[stage.index] for stage in stages})
    tps: Sequence[int] = (here.tp,) if placement.sharded else range(mesh.tp)
    if in_rows and not part.plan.scatters:  # ZeRO-1 shards rows over tied stages, too
        pps = (here.pp,)
        tps = (here.tp,) if placement == R else tps
    return tuple(mesh.rank(pp, dp, tp) for pp in pps for dp in dps for tp in tps)


def _writers(
    holders: Mapping[str, tuple[int, ...]], own: Mapping[str, OwnTensor]
) -> dict[str, int]:
    """The rank that writes each tensor, by name.

    A parameter goes to the holder with the fewest elements so far, any other tensor to the first.
    """
    writers = {name: ranks[0] for name, ranks in holders.items()}
    elements_of: dict[tuple[int, ...], list[int]] = {}
    for name in sorted(holders, key=lambda name: -prod(own[name].shape)):  # stable: names' order
        ranks = holders[name]
        if own[name].kind == "parameter":
            elements = elements_of.setdefault(ranks, [0] * len(ranks))
            least = elements.index(min(elements))
            elements[least] += prod(own[name].shape)
            writers[name] = ranks[least]
    return writers


def leads(pieces: Iterable[Piece]) -> bool:
    """Whether the first element of the whole tensor is in these pieces."""
    return any(not any(piece.whole) for piece in pieces)


def _filled(found: Iterable[Piece]) -> tuple[Piece, ...]:
    return tuple(piece for piece in found if prod(piece.shape))


def _with(shape: Shape, dim: int, length: int) -> Shape:
    return (*shape[:dim], length, *shape[dim + 1 :])
