"""Functions that refer to parts of a model refer to its copy's parts after copying."""

import functools

import pytest
import torch
from torch import nn

from autopipe.frontend.construct import fake_copy
from tests.support.odd_models import Net, built, planned, regions_of, traced, unlike


class Patched(Net):
    """Its forward calls the one before, as code does that captures attention maps or adds to it."""

    def begin(self):
        self.middle.forward = self.changed(self.middle.forward)

    def changed(self, old):
        return lambda x: old(2 * x)


class Twice(Patched):
    def changed(self, old):
        inner = super().changed(old)

        @functools.wraps(inner)
        def outer(x):
            return inner(x) + x

        return outer


class Partly(Patched):
    def changed(self, old):
        scaled = functools.partial(torch.mul, 3.0)
        again = functools.partial(old)
        return lambda x: scaled(again(x))


class Listed(Patched):
    """A list and a dict of layers, and a list of functions that the model itself has."""

    def changed(self, old):
        layers, by_name = [self.up, self.middle], {"down": self.down}
        self.steps = [lambda x, layer=self.down: x * layer.bias.sum(), lambda x: x + 1]
        return lambda x: old(x) * layers[0].bias + by_name["down"].bias.sum()

    def inside(self, hidden):
        hidden = self.middle(hidden)
        for step in self.steps:
            hidden = step(hidden)
        return hidden


KINDS = [Patched, Twice, Partly, Listed]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_given_as_a_module(kind):
    """Bug: "the model computes with a tensor that is none of the model's parameters"."""
    planned(built(kind))
    assert unlike(built(kind)) == []


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("kind", KINDS)
def test_beside_what_runs_as_it_is(kind):
    """Bug: "reads parameters in this micro-batch that it has not read when it was planned"."""

    class Hooked(kind):
        def begin(self):
            super().begin()
            self.middle.register_full_backward_hook(lambda m, i, o: (3 * i[0],))

    assert unlike(built(Hooked), traced=traced(Hooked)) == []
    assert regions_of(Hooked) == ["middle"]


class Gated(Net):
    """One hook leaves a tensor in a variable, another one reads it there."""

    def begin(self):
        gate = None

        def leave(layer, args, out):
            nonlocal gate
            gate = out.sigmoid()

        self.up.register_forward_hook(leave)
        self.middle.register_forward_hook(lambda layer, args, out: out * gate)


def test_two_functions_share_a_variable():
    """Bug: each copy had its own, and the second hook failed."""
    planned(built(Gated))
    assert unlike(built(Gated)) == []


def test_what_the_model_does_not_hold_is_shared():
    seen, model = [], nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda m, a, out: seen.append(type(m)))
    model[0].forward = lambda x: x
    copied = fake_copy(model)
    copied(torch.ones(2, 4))
    assert seen == [nn.Linear]
    assert copied[0].forward is model[0].forward
