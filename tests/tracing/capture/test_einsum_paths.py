"""An einsum of three tensors is in the graph, whatever library chooses its order of products."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.backends import opt_einsum

from autopipe.batch.description import describe
from autopipe.tracing.symbolic_sequence import trace_lengths
from tests.support.odd_models import Net, built, inputs, square, unlike
from tests.support.staged import trace_model


class OfThree(Net):
    """A selective state space model's input, and a bilinear form."""

    def begin(self):
        self.form = nn.Parameter(torch.randn(8, 8, 8) / 8)

    def inside(self, hidden):
        other = self.middle(hidden)
        return torch.einsum("bi,ijk,bj->bk", hidden, self.form, other) + torch.einsum(
            "bi,bj,bj->bi", other, hidden, other
        )


def by_operations(equation, *operands, optimize, shapes=False):
    """As opt_einsum does it, which need not be installed: it compares counts of operations."""
    first, second, third = (one if shapes else one.shape for one in operands)
    assert first[-1] == third[-1] == 8
    return [(0, 1), (0, 1)] if first[0] * second[-1] < 448 else [(1, 2), (0, 1)], None


class Linear(nn.Module):
    """Attention without a softmax: a token's cost grows with the length in one of its orders."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 8)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return torch.einsum("bqd,bkd,bkv->bqv", x, x, x).square().mean()


def test_an_order_is_chosen_for_rows_as_long_as_the_plan_s(monkeypatch):
    """Bug: with a symbol for the length it was chosen for two tokens, and grew with their square.

    Eager multiplies k by v first where rows are longer than wide.
    """
    told = set()

    def contract_path(equation, *operands, optimize, shapes=False):
        told.update(operands if shapes else ())
        return [(1, 2), (0, 1)], None

    library = SimpleNamespace(contract_path=contract_path)
    monkeypatch.setitem(opt_einsum.get_opt_einsum.__globals__, "enabled", True)
    monkeypatch.setattr(opt_einsum, "get_opt_einsum", lambda: library)
    monkeypatch.setattr(opt_einsum, "is_available", lambda: True)

    def batch(rows):
        return {"tokens": torch.zeros(rows, 12, dtype=torch.int64)}

    found = trace_lengths(Linear, batch(2), describe(batch(2), batch(3), 2, 3), None)
    assert found.longest == 12
    assert told == {(2, 12, 8)}


@pytest.mark.parametrize("installed", [True, False])
def test_an_einsum_of_three_tensors_fixes_no_number_of_rows(monkeypatch, installed):
    """Bug: with opt_einsum installed its call ran as it is: neither cut, nor divided by tp."""
    library = SimpleNamespace(contract_path=by_operations) if installed else None
    monkeypatch.setitem(opt_einsum.get_opt_einsum.__globals__, "enabled", installed)
    monkeypatch.setattr(opt_einsum, "get_opt_einsum", lambda: library)
    monkeypatch.setattr(opt_einsum, "is_available", lambda: installed)
    trace = trace_model(built(OfThree), inputs, square)
    assert trace.regions == ()
    assert unlike(built(OfThree), traced=trace, cuts=["relu/1"]) == []
