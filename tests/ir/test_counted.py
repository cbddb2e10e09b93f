"""`torch.bincount` with a length: as many entries as it says, in a graph too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopipe.ir.tensors import counted
from tests.support.odd_models import Net, built, unlike
from tests.support.staged import trace_model


@pytest.mark.parametrize("weights", [None, torch.float32, torch.float16, torch.int64])
def test_it_counts_as_torch_does(weights: torch.dtype | None) -> None:
    x = torch.tensor([1, 3, 1, 0], dtype=torch.int32)
    each = None if weights is None else torch.tensor([1, 2, 3, 4]).to(weights)
    expected, found = torch.bincount(x, each, minlength=6), counted(x, each, minlength=6)
    assert found is not None
    assert (found.tolist(), found.dtype) == (expected.tolist(), expected.dtype)


def test_a_larger_entry_makes_it_longer_and_so_does_no_length() -> None:
    x = torch.tensor([1, 3])
    assert counted(x, minlength=3) is None and counted(x) is None
    assert counted(x[:0], minlength=3) is not None


class Degrees(Net):
    """A graph's nodes lie behind those of the graphs before it, as graph nets have them."""

    def inside(self, hidden: Tensor) -> Tensor:
        near = torch.arange(hidden.shape[0]) // 2
        degrees = torch.bincount(near, minlength=hidden.shape[0])
        return self.middle(hidden) * degrees.clamp(min=1)[:, None]


def test_a_length_may_grow_with_the_rows() -> None:
    """Bug: "a size here depends on the values of a tensor"."""
    assert unlike(built(Degrees)) == []


class Beyond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return self.layer(x).sum() * torch.bincount(chosen, minlength=2).sum()


def test_what_is_longer_for_the_rows_of_a_trace_runs_as_it_is() -> None:
    def inputs(rows: int) -> dict[str, Tensor]:
        return {"x": torch.ones(rows, 8), "chosen": torch.full((rows,), 5)}

    (region,) = trace_model(Beyond(), inputs).regions
    assert "a size here depends on the values of a tensor" in region.why
