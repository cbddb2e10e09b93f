"""A gradient that a part of a model takes itself goes as far as it does in the whole model."""

import torch
from torch import nn

from tests.support.odd_models import (
    Net,
    built,
    inputs,
    square,
    traced,
    unlike,
    unlike_whole_or_cut,
)
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
        assert unlike_whole_or_cut(built(kind), cuts=["relu/1"]) == []


class ByItsInput(Net):
    """Physics-informed: coordinates require a gradient from the first line on, and a method takes
    one by them, or by a part of them."""

    def forward(self, x):
        x.requires_grad_(True)
        weight = self.up(x).tanh()[:, :1]
        return self.residual(x) * weight.sigmoid()

    def residual(self, x):
        time = x[:, 1:2]
        made = self.down(self.middle(self.up(torch.cat([x[:, :1], time, x[:, 2:]], 1)).tanh()))
        by_all = torch.autograd.grad(made.sum(), x, create_graph=True)[0]
        by_time = torch.autograd.grad(made.sum(), time, create_graph=True)[0]
        return made - by_all[:, :4] + by_time


def test_what_a_part_is_given_requires_a_gradient_as_it_does_in_the_model():
    """Bug: refused, "the graph of the model fails where the model does not", without a line: no
    graph says `x.requires_grad_()`, so the part was given an x that required none."""
    (region,) = traced(ByItsInput).regions
    assert (region.method, region.carrying) == ("residual", (0,))
    assert unlike_whole_or_cut(built(ByItsInput), traced=traced(ByItsInput), cuts=["tanh/0"]) == []


class SolvedApart(Net):
    """As deep equilibria have it: what solves for a state runs without gradients, one step with."""

    def solve(self, hidden):
        state = torch.zeros_like(hidden)
        for rows in (hidden.sum(1) > 0).nonzero():
            state = state.index_copy(0, rows, self.middle(hidden[rows]).tanh())
        return state

    def inside(self, hidden):
        with torch.no_grad():
            state = self.solve(hidden)
        return self.middle(state + hidden)


def test_a_call_under_no_grad_that_runs_as_it_is_records_no_gradients():
    """Bug: it was called outside of no_grad, and refused as it ran: "solve(), which runs as it is,
    gives a tensor with a gradient in this micro-batch, and had none when it was planned"."""
    assert unlike(built(SolvedApart), traced=traced(SolvedApart)) == []
    regions = traced(SolvedApart).graph.regions.values()
    assert [(one.region.name, one.region.grad) for one in regions] == [("solve()", False)]


class StepsDown(SolvedApart):
    """And a method under no_grad that takes a gradient by what it was given, as adversaries do."""

    def solve(self, hidden):
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.middle(hidden).tanh().sum(), hidden)
        return hidden - 0.5 * slope


def test_a_call_under_no_grad_may_take_a_gradient_by_what_it_is_given():
    assert unlike(built(StepsDown)) == []
