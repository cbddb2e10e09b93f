"""Errors that a trace alone raises, in code that catches them: a graph is not of the other branch.

Planning compares a small model with its graph; of a large one these branches went in without a
word.
"""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

from autopipe.planners.driver import against_eager
from tests.support.odd_models import (
    Net,
    built,
    inputs,
    planned,
    refusal,
    square,
    unlike,
    unlike_whole_or_cut,
)
from tests.support.staged import trace_model


@pytest.fixture(autouse=True)
def large(monkeypatch):
    monkeypatch.setattr(against_eager, "MOST_FLOPS", 0)


class ReadsAValue(Net):
    def inside(self, hidden):
        return self.scaled(self.middle(hidden))

    def scaled(self, hidden):
        try:
            scale = float(hidden.std())
        except Exception:
            scale = 1.0
        return hidden / scale


class ByNumpy(ReadsAValue):
    def scaled(self, hidden):
        scale = 1.0
        with contextlib.suppress(Exception):
            scale = float(np.abs(hidden.detach().numpy()).mean())
        return hidden / scale


@pytest.mark.parametrize("kind", [ReadsAValue, ByNumpy])
def test_lines_that_read_a_value_and_catch_that_a_trace_has_none_run_as_they_are(kind):
    """Bug: a graph in which scale is 1, without a word."""
    said = []
    planned(built(kind), said=said, loss_over="micro-batch")
    assert any(line.startswith("scaled") and "runs as it is" in line for line in said), said


def test_an_array_of_values_is_what_the_model_makes_of_it():
    assert unlike(built(ByNumpy)) == []


class FallsBack(Net):
    """The first way fails of any tensor."""

    def inside(self, hidden):
        hidden = self.middle(hidden).t()
        try:
            wide = hidden.view(-1, 4, 2)
        except RuntimeError:
            wide = hidden.t().reshape(-1, 4, 2)
        try:
            hidden = torch.as_tensor(self.middle.weight.numpy())
        except RuntimeError:
            return wide.flatten(1)


class Freezes(Net):
    def inside(self, hidden):
        with contextlib.suppress(Exception):
            self.middle.weight.requires_grad_(False)
        return self.middle(hidden)


def test_a_refusal_that_the_model_catches_is_one_all_the_same():
    assert "forward sets requires_grad=False on a parameter of shape (8, 8)" in (
        refusal(built(Freezes))
    )


def test_an_error_that_the_model_raises_by_itself_may_be_caught():
    planned(built(FallsBack))
    assert unlike(built(FallsBack)) == []


class Block(nn.Module):
    """Its own layer raises, before or behind what it computes, as the block is called otherwise."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, **given):
        return self.layer(self.layer(x), **given)


class TriesArguments(Net):
    """As containers of speechbrain call their layers, of which some take lengths."""

    def begin(self):
        self.middle = nn.ModuleList([nn.Linear(8, 8), nn.Tanh(), Block(nn.Linear(8, 8))])

    def inside(self, hidden):
        for layer in self.middle:
            try:
                hidden = layer(hidden, lengths=None)
            except TypeError:
                hidden = layer(hidden)
        return hidden


def test_a_call_of_a_module_that_ends_with_a_caught_error_is_forgotten():
    """Bug: refused, "Unexpected key": torch kept the call that had ended."""
    found = trace_model(built(TriesArguments), inputs, square)
    scopes = [node.scopes[-1] for node in found.graph.nodes if node.short == "linear"]
    assert scopes == ["up", "middle.0", "middle.2.layer@1", "middle.2.layer@2", "down"]
    assert unlike_whole_or_cut(built(TriesArguments), traced=found, cuts=["relu/1"]) == []
