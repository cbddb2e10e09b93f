"""Random numbers from outside torch are found, however seldom they change a result."""

import random
from random import uniform

import numpy as np
import pytest
from torch import nn

from autopipe.eager.draws import Generators
from tests.support.odd_models import Net, built, planned, refusal, unlike


class Own(Net):
    """Leaves its middle out, in one call of a thousand: `rare` tells when."""

    def begin(self):
        self.chance = self.made()

    def inside(self, hidden):
        return hidden if self.rare() else self.middle(hidden)

    def made(self):
        return random.Random(0)

    def rare(self):
        return self.chance.random() < 0.001


class OwnInteger(Own):
    def rare(self):
        return self.chance.randint(1, 1000) == 1000


class OwnWaiting(Own):
    """An expovariate() of Python asks for a random()."""

    def rare(self):
        return self.chance.expovariate(1.0) > 30


class OwnNumpy(Own):
    def made(self):
        return np.random.default_rng(0)


class OwnNumpyInteger(OwnNumpy):
    def rare(self):
        return self.chance.integers(1000) == 999


class OwnNumpyChoice(OwnNumpy):
    def rare(self):
        return bool(self.chance.choice(1000, size=2).max() == 999)


class OwnState(Own):
    def made(self):
        return np.random.RandomState(0)

    def rare(self):
        return self.chance.rand(2).max() < 0.001


class OwnMethod(Own):
    def made(self):
        return random.Random(0).random

    def rare(self):
        return self.chance() < 0.001


class Imported(Own):
    def rare(self):
        return uniform(0, 1000) < 1


@pytest.mark.sweep(of=18)
@pytest.mark.parametrize("kind", [Own, *Own.__subclasses__(), *OwnNumpy.__subclasses__()])
def test_a_draw_that_seldom_matters_is_refused_with_its_line(kind, size):
    """Bug: 2 draws of a model's own generator were looked at, of which none mattered."""
    found = refusal(built(kind))
    assert "test_draws.py:" in found and "random numbers that are not torch's" in found


class OneOfTwo(Own):
    """Draws one of two layers, whose calls differ by their weights alone."""

    def begin(self):
        self.other = nn.Linear(8, 8)

    def inside(self, hidden):
        return random.choice([self.middle, self.other])(hidden)


def test_a_draw_of_one_of_equal_layers_is_refused_with_its_line(size):
    """Bug: a large model trained the layer of the first draw for good, and the other one never."""
    found = refusal(built(OneOfTwo))
    assert "test_draws.py:" in found and "random numbers that are not torch's" in found


class Never(Own):
    def rare(self):
        return self.chance.random() < 0


@pytest.mark.sweep(of=2)
def test_a_draw_that_never_matters_is_no_obstacle(size):
    model = built(Never)
    before = model.chance.getstate()
    planned(model)
    assert model.chance.getstate() == before, "planning has put back what it drew"
    assert unlike(built(Never)) == []


class OfTheSystem(Never):
    def made(self):
        return random.SystemRandom()


def test_so_is_one_that_has_no_state():
    """Bug: a traceback, as there is nothing to put back."""
    planned(OfTheSystem)


@pytest.mark.parametrize("made", [random.Random, np.random.default_rng, np.random.RandomState])
def test_generators_are_put_back(made):
    model = built(Never)
    model.chance = made(3)
    generators = Generators(model)
    before = generators.places()
    with generators.restored():
        random.random(), np.random.rand(), model.chance.random()
        assert all(a != b for a, b in zip(generators.places(), before, strict=True))
    assert generators.places() == before
