"""Which elements of a tensor a rank holds: each is on one rank, and where torch itself puts it."""

import pytest
import torch
from torch import Tensor

from autopipe.planfile.placements import I, Placement, S, own_rows
from autopipe.runtime.checkpoint.layout import Piece, leads, pieces_of_rank, rows_of
from autopipe.sharding.collectives import in_rows, own_part


def taken(whole: Tensor, pieces: tuple[Piece, ...], shape: tuple[int, ...]) -> Tensor:
    """The own tensor that these pieces describe."""
    own = torch.full(shape, -1)
    for piece in pieces:
        there = tuple(slice(b, b + n) for b, n in zip(piece.whole, piece.shape, strict=True))
        here = tuple(slice(b, b + n) for b, n in zip(piece.own, piece.shape, strict=True))
        own[here] = whole[there]
    return own


@pytest.mark.parametrize("lies", [I, S(0), S(1), S(0, 3), S(1, 2), S(0, (8, 4)), S(1, (4, 2, 2))])
@pytest.mark.parametrize("dealt_to", [1, 2, 5, 7])
def test_pieces_are_what_a_rank_holds(lies: Placement, dealt_to: int) -> None:
    """First tensor parallelism's part, then ZeRO's rows of it; of 6 rows for 7 ranks, columns."""
    whole = torch.arange(96).view(12, 8)
    for tp in range(2):
        part = own_part(whole, lies, 2, tp) if lies.sharded else whole
        for rank in range(dealt_to):
            own = own_rows(part.shape, dealt_to, rank)
            pieces = rows_of(pieces_of_rank((12, 8), lies, 2, tp), own)
            rows = in_rows(part, own)
            assert torch.equal(taken(whole, pieces, tuple(rows.shape)), rows)
            assert leads(pieces) == bool((rows == 0).any())


def test_a_rank_without_rows() -> None:
    """Three ranks, two rows: the last one has none."""
    assert rows_of(pieces_of_rank((2, 2), I, 1, 0), own_rows((2, 2), 3, 2)) == ()
