"""Python's min and max of tensors in a model: an op of the graph, not a branch."""

import math

import pytest
import torch
from torch import nn

from tests.support.odd_models import Net, built, inputs, planned, square, unlike
from tests.support.staged import trace_model


class Decays(Net):
    """As latent diffusion averages its weights: a decay that rises to its limit."""

    def begin(self):
        self.register_buffer("limit", torch.tensor(0.2))
        self.register_buffer("updates", torch.tensor(0, dtype=torch.int))

    def inside(self, hidden):
        self.updates += 1
        return self.middle(hidden) * min(self.limit, (1 + self.updates) / (10 + self.updates))


class WithANumber(Net):
    def inside(self, hidden):
        kept = (hidden > 1).sum()
        hidden = self.middle(hidden)
        return hidden / max(kept, 1) * max(0.5, hidden.mean()) * min(hidden.sum(), 3.0)


class Equal(Net):
    """Where both are equal Python takes the first, and all of the gradient goes there."""

    def inside(self, hidden):
        one = self.middle(hidden).sum()
        other = one.detach().clone()
        return self.middle(hidden) * max(one, other) + min(other, one)


class OfSizes(Net):
    """Numbers, symbols and lists are Python's as before."""

    def inside(self, hidden):
        width = max(hidden.shape[1], 3) + min([4, 2]) + max((1, 5), key=lambda n: -n)
        return self.middle(hidden) / width * math.pow(2.0, 0.5)


class Power(Net):
    def begin(self):
        self.register_buffer("base", torch.tensor(1.5))

    def inside(self, hidden):
        return self.middle(hidden) * math.pow(self.base, 2)


class ExpertsBeforeRows(Net):
    """As Llama 4 has them: every expert takes every row, and a view puts both dims together."""

    def begin(self):
        self.experts = nn.Parameter(torch.randn(3, 8, 8) / 4)

    def inside(self, hidden):
        repeated = hidden.repeat(3, 1).view(3, -1, 8)
        every = torch.bmm(repeated, self.experts).view(-1, 8)
        return every.reshape(3, -1, 8).sum(0)


@pytest.mark.parametrize(
    "kind", [Decays, WithANumber, Equal, OfSizes, Power, ExpertsBeforeRows], ids=str
)
def test_it_computes_what_eager_computes(kind):
    """Bug: a read that was recorded was none in the trace, and the model was refused."""
    assert unlike(built(kind)) == []


@pytest.mark.parametrize(("kind", "reads"), [(Decays, 0), (WithANumber, 0), (Power, 1)], ids=str)
def test_an_extreme_is_no_branch(kind, reads):
    """Of the decays of three micro-batches, 2/11, 3/12 and 4/13, two are above the limit."""
    assert len(trace_model(built(kind), inputs, square).reads) == reads


def test_a_view_of_experts_and_rows_fixes_no_rows():
    """Bug: torch took min(8, 64 * rows) for a size, and the number of rows was said to be fixed."""
    assert not planned(built(ExpertsBeforeRows), pp=2, micro_batches=2).regions


def test_a_mean_over_at_least_one_label():
    def loss(outputs, batch):
        kept = batch["y"] > 0
        errors = (outputs - batch["y"]).square()
        return (errors * kept).sum() / max(kept.sum(), 1)

    assert not planned(built(Net), loss, pp=2, micro_batches=2).regions
