"""A gradient that a part of a model takes itself goes as far as it does in the whole model."""

import torch
from torch import nn

from tests.support.odd_models import Net, built, inputs, square, unlike
from tests.support.staged import trace_model


class Adapted(Net):
    """One step of gradient descent in forward, as MAML makes it.

    The weight has made what it is adapted on: of its gradient a part goes through an earlier layer.
    """

    def inside(self, hidden):
        hidden = self.middle(hidden).tanh()
        return hidden + self.adapted(hidden)

    def adapted(self, hidden):
        weight = self.middle.weight
        (slope,) = torch.autograd.grad((hidden @ weight).square().mean(), weight, create_graph=True)
        return hidden @ (weight - 0.5 * slope)


class AdaptedApart(Adapted):
    """The weight has made nothing that the part is given."""

    def begin(self):
        self.own = nn.Linear(8, 8)

    def adapted(self, hidden):
        (slope,) = torch.autograd.grad(
            self.own(hidden).square().mean(), self.own.weight, create_graph=True
        )
        return hidden @ (self.own.weight - 0.5 * slope)


def part_of(kind):
    """Which part of a model runs as it is."""
    (region,) = trace_model(built(kind), inputs, square).regions
    return region.method


def test_a_part_is_as_large_as_the_gradient_is_long():
    """Bug: `adapted` was a part by itself. In one stage its gradient went through the layer before;
    in two, and on tensor-parallel ranks, it ended at what the part was given, without a word."""
    assert part_of(Adapted) == "inside"
    assert part_of(AdaptedApart) == "adapted"
    for kind in (Adapted, AdaptedApart):
        assert unlike(built(kind)) == []
        assert unlike(built(kind), cuts=["relu/1"]) == []
