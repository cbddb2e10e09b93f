"""Parameters that Python finds elsewhere than where they are registered are trained all the same.

A model is built without memory: what is registered is another tensor than what the constructor has
made, and lists that it keeps beside hold the first one.
"""

import pytest
import torch
from torch import nn

from autopipe.batch.description import describe
from autopipe.frontend.construct import build_fake
from autopipe.tracing.trace import trace
from tests.support.long import chosen
from tests.support.odd_models import Net, built, inputs, square, unlike


class InAList(Net):
    """Weights in a list, and in a ParameterList for the optimizer."""

    def begin(self):
        self.ws = [nn.Parameter(torch.randn(8, 8) / 4) for _ in range(2)]
        self.params = nn.ParameterList(self.ws)

    def inside(self, hidden):
        for w in self.ws:
            hidden = (hidden @ w).tanh()
        return hidden


class InModulesOfAList(Net):
    """As N-BEATS is written: its stacks are plain tuples, and their weights a ParameterList."""

    def begin(self):
        self.stacks = [("trend", [nn.Linear(8, 8)]), ("season", [nn.Linear(8, 8)])]
        layers = (layer for _, stack in self.stacks for layer in stack)
        self.params = nn.ParameterList([p for layer in layers for p in layer.parameters()])

    def inside(self, hidden):
        for _, (layer,) in self.stacks:
            hidden = hidden + layer(hidden).tanh()
        return hidden


class Affine:
    """What a user's object computes with weights that it is given."""

    def __init__(self, weight, bias):
        self.weights = {"weight": weight, "bias": bias}

    def __call__(self, hidden):
        return hidden @ self.weights["weight"] + self.weights["bias"]


class InAnObject(Net):
    def begin(self):
        weight, bias = nn.Parameter(torch.randn(8, 8) / 4), nn.Parameter(torch.randn(8))
        self.affine = Affine(weight, bias)
        self.weight, self.bias = weight, bias

    def inside(self, hidden):
        return self.affine(hidden)


class InAClosure(Net):
    def begin(self):
        gain = nn.Parameter(torch.full((8,), 0.5))
        self.gain, self.act = gain, lambda hidden: (hidden * gain).tanh()

    def inside(self, hidden):
        return self.act(self.middle(hidden))


KINDS = (InAList, InModulesOfAList, InAnObject, InAClosure)


@pytest.mark.parametrize(
    "kind",
    chosen(KINDS, now=(InAList,)),
)
def test_they_are_trained_in_a_model_that_is_given(kind):
    """Bug: refused, without a line: "none of the model's parameters"."""
    assert unlike(built(kind), cuts=["relu/1"]) == []


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_parameters_of_the_graph_of_a_model_that_is_built_for_it(kind):
    """Bug: the numbers of a list's were constants of the graph, which nobody trains.

    The comparison with the model found it, which large models go without.
    """
    batch = inputs(2)
    specs = describe(batch, inputs(3), 2, 3)
    found = trace(build_fake(kind), batch, specs, square)
    trained = {name for name, state in found.graph.states.items() if state.trainable}
    used = {"middle.weight", "middle.bias"} if kind is not InAClosure else set()
    assert trained == {name for name, _ in kind().named_parameters()} - used
    assert not found.graph.constants
