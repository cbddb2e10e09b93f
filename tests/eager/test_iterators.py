"""Iterators that a model draws from are seen, and put back; generators of random numbers too."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from autopipe.eager.iterators import Rewindable, place_of, put_at
from autopipe.eager.kept import restoring
from autopipe.errors import ModelError
from tests.support.odd_models import Net, built, inputs, planned, refusal, unlike


class Drawing(Net):
    """Each call scales by the next number; `numbers` gives them."""

    def begin(self):
        self.numbers = self.made()

    def inside(self, hidden):
        return self.middle(hidden) * next(self.numbers)


class Alternating(Drawing):
    def made(self):
        return itertools.cycle([1.0, 2.0])


class EachFourth(Drawing):
    """Planning calls it two times, and then far ahead."""

    def made(self):
        return itertools.cycle([1.0, 1.0, 1.0, 2.0])


class Warm(Drawing):
    def made(self):
        return map(lambda step: 1.0 if step < 50 else 2.0, itertools.count())


class Listed(Drawing):
    def made(self):
        return iter([1.0, 2.0] * 100)


class InADict(Net):
    def begin(self):
        self.state = {"numbers": itertools.cycle([1.0, 2.0])}

    def inside(self, hidden):
        return self.middle(hidden) * next(self.state["numbers"])


class InAFunction(Net):
    def begin(self):
        numbers = itertools.cycle([1.0, 2.0])
        self.scale = lambda: next(numbers)

    def inside(self, hidden):
        return self.middle(hidden) * self.scale()


@pytest.mark.sweep(of=12)
@pytest.mark.parametrize(
    "kind, name",
    [
        (Alternating, "numbers"),
        (EachFourth, "numbers"),
        (Warm, "numbers"),
        (Listed, "numbers"),
        (InADict, "state"),
        (InAFunction, "InAFunction.begin.<locals>.<lambda>"),
    ],
)
def test_a_model_that_computes_with_what_it_draws_is_refused_by_name(kind, name, size):
    """Bug: of a large model each micro-batch was the first, without a word."""
    assert f"keeps {name}" in refusal(built(kind))
    assert f"keeps {name}" in refusal(kind)


class Generated(Drawing):
    def made(self):
        while True:
            yield 1.0
            yield 2.0


def test_so_is_one_that_draws_from_a_generator(size):
    """Bug: a traceback, "cannot pickle", of a model that is given as a module."""
    assert "keeps numbers" in refusal(Generated)
    with pytest.raises(ModelError) as error:
        planned(built(Generated))
    assert str(error.value).startswith(
        "the model is given as a module, and 'numbers' in it cannot be copied: TypeError"
    )


class Numbered(Net):
    def begin(self):
        self.calls = itertools.count()

    def inside(self, hidden):
        self.last = next(self.calls)
        return self.middle(hidden)


@pytest.mark.long
def test_what_is_drawn_and_not_computed_with_is_no_obstacle(size):
    model = built(Numbered)
    planned(model)
    assert next(model.calls) == 0, "planning has put back what it drew"
    assert unlike(built(Numbered)) == []


def test_an_iterator_gives_once_more_what_was_drawn():
    model = built(Alternating)
    with restoring(model) as changed:
        assert changed() == ()
        first = model(inputs(2)["x"])
        assert changed() == ("numbers",)
        with restoring(model) as within:
            assert within() == (), "the second call begins where the first has ended"
            second = model(inputs(2)["x"])
        assert torch.equal(second, model(inputs(2)["x"]))
    assert not isinstance(model.numbers, Rewindable)
    assert torch.equal(first, model(inputs(2)["x"]))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("made", [random.Random, np.random.default_rng, np.random.RandomState])
def test_a_generator_of_random_numbers_is_put_back(made):
    numbers = made(3)
    place = place_of(numbers)
    drawn = numbers.random()
    assert place_of(numbers) != place
    put_at(numbers, place)
    assert place_of(numbers) == place and numbers.random() == drawn


class Copies(Net):
    def begin(self):
        self.copies = [parameter.clone() for parameter in self.middle.parameters()]

    def inside(self, hidden):
        return F.linear(hidden, *self.copies)


class Unread(Copies):
    def inside(self, hidden):
        return self.middle(hidden)


class InForward(Net):
    def inside(self, hidden):
        self.copies = [parameter.clone() for parameter in self.middle.parameters()]
        return F.linear(hidden, *self.copies)


def test_copies_of_parameters_in_a_list_are_refused_by_name():
    """Bug: a traceback of copy.deepcopy; of a function that builds the model, a sentence about
    torch's own constants."""
    for given in (Copies, built(Copies)):
        assert (
            "the model keeps parameters, or what it has made of them, in copies, which is outside "
            "of its own parameters and buffers, and computes with them\nhint: read a parameter"
        ) in refusal(given)


def test_copies_that_forward_makes_or_does_not_read_are_no_obstacle():
    planned(built(Unread))
    assert unlike(built(InForward)) == []
