"""Sharded optimizers leave the parameters of one process; `zero1_stories`, `zero2_stories`."""

import pytest
import torch

from autopipe.runtime.parameters.row_shards import own_rows, same_elements
from tests.support.zero_told import Stories


class TestStories(Stories):
    file = "zero"


@pytest.mark.parametrize("rows", range(8))
@pytest.mark.parametrize("ranks", range(1, 6))
def test_rows_are_dealt_as_torch_deals_them(rows: int, ranks: int) -> None:
    """`torch.chunk`, which gives no empty chunks: the ranks that come too late have none."""
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks)] if rows else []
    dealt = [list(range(*own_rows(rows, ranks, rank))) for rank in range(ranks)]
    assert dealt == chunks + [[]] * (ranks - len(chunks))


def test_a_parameter_and_its_columns() -> None:
    """The picture: 8 elements, 3 to each of 4 ranks, in a table with another parameter's 2."""
    table = torch.full((4, 5), -1)
    for flat, column in same_elements(torch.arange(8), table[:, 2:]):
        column.copy_(flat)
    assert table[:, 2:].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, -1], [-1, -1, -1]]
    assert bool((table[:, :2] == -1).all())
