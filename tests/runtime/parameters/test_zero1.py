"""Sharded optimizers leave the parameters of one process; `zero1_stories`, `zero2_stories`."""

import pytest
import torch

from autopipe.planfile.placements import own_rows
from autopipe.runtime.parameters.row_shards import same_elements
from autopipe.sharding.collectives import in_rows
from tests.support.zero_told import Stories


class TestStories(Stories):
    file = "zero"


@pytest.mark.parametrize("rows", range(8))
@pytest.mark.parametrize("ranks", range(1, 6))
def test_rows_are_dealt_as_torch_deals_them(rows: int, ranks: int) -> None:
    """`torch.chunk`, which gives no empty chunks: the ranks that come too late have none."""
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks)] if rows else []
    dealt = [list(range(*own_rows((rows,), ranks, rank)[1:])) for rank in range(ranks)]
    assert dealt == chunks + [[]] * (ranks - len(chunks))


def test_a_parameter_and_its_columns() -> None:
    """The picture: 8 elements for 3 ranks, in a table with another parameter's 2 columns."""
    table = torch.full((3, 5), -1)
    for flat, column in same_elements(torch.arange(8), table[:, 2:]):
        column.copy_(flat)
    assert table[:, 2:].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, -1]]
    assert bool((table[:, :2] == -1).all())


@pytest.mark.parametrize("shape", [(8,), (5, 3), (2, 7, 3), (3, 2, 2), (1, 1, 9), (2, 3), (0, 8)])
@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
def test_columns_are_the_ranks_shares(shape: tuple[int, ...], ranks: int) -> None:
    """Also of a dim behind the first, of strided parameters, and where some ranks have none."""
    for whole in (torch.randn(shape), torch.randn(shape[::-1]).permute(*range(len(shape))[::-1])):
        widths = own_rows(shape, ranks, 0).elements(shape)
        column = torch.full((ranks, widths + 2), torch.nan)[:, 1:-1]
        for source, target in same_elements(whole, column):
            target.copy_(source)
        for rank in range(ranks):
            own = in_rows(whole, own_rows(shape, ranks, rank))
            assert torch.equal(column[rank, : own.numel()].view(own.shape), own)
            assert bool(column[rank, own.numel() :].isnan().all())
