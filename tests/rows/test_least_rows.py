"""Batch norm needs two values of each channel: rows that give it one are no micro-batch."""

import pytest
import torch
from torch import nn

from autopipe.errors import ModelError
from autopipe.ir.graph import Graph
from autopipe.planners.driver.request import micro_batch_rows
from autopipe.planners.model.problem import Constraints
from autopipe.rows.least_rows import Least, check_rows, least_rows
from tests.support.staged import trace_model


def graph(*, side: int | None = None, training: bool = True) -> Graph:
    """Batch norm of 4 channels, of vectors or of images."""
    norm: nn.Module = nn.BatchNorm1d(4) if side is None else nn.BatchNorm2d(4)
    shape = () if side is None else (side, side)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x).square().mean()

    example = lambda rows: {"x": torch.randn(rows, 4, *shape)}  # noqa: E731
    return trace_model(Net(), example, training=training).graph


def test_as_many_as_make_two_values_of_a_channel() -> None:
    assert least_rows(graph()).rows == 2
    assert least_rows(graph(side=1)).rows == 2
    assert least_rows(graph(side=2)).rows == 1
    assert least_rows(graph(training=False)).rows == 1


def test_fewer_are_no_candidates() -> None:
    found = micro_batch_rows(12, 2, Constraints(), Least(2, "net.py:7"))
    assert found == [2, 3, 4, 6, 12]


def test_fewer_that_were_asked_for_are_refused_with_the_line() -> None:
    with pytest.raises(ModelError) as refused:
        micro_batch_rows(8, 2, Constraints(dp=1, micro_batches=8), Least(2, "net.py:7"))
    assert str(refused.value) == (
        "net.py:7: batch norm trains on more than one value of each channel, and a micro-batch of "
        "1 row has one\nhint: micro-batches of at least 2 rows: fewer of them, or a larger batch"
    )


def test_a_graph_does_not_refuse_by_itself() -> None:
    """The op divides by zero where the module would have raised: whoever runs it must look."""
    x, ones = torch.randn(1, 4), torch.ones(4)
    var = torch.ones(4)
    torch.ops.aten.batch_norm(x, ones, ones, torch.zeros(4), var, True, 0.1, 1e-5, False)
    assert not var.isfinite().all()
    check_rows(least_rows(graph()), 2)
    with pytest.raises(ModelError, match=r"test_least_rows\.py:\d+: batch norm trains"):
        check_rows(least_rows(graph()), 1)
