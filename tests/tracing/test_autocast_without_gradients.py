"""Gradients go off inside of torch.autocast, as teachers and pseudo labels have it under AMP.

with torch.autocast("cpu", torch.bfloat16):     torch.export has a submodule for each side of
    made = self.middle(x)                       torch.no_grad(), and none says which is which
    with torch.no_grad():
        target = self.middle(x)
"""

import pytest
import torch

from tests.support.odd_models import (
    Net,
    built,
    inputs,
    square,
    unlike_whole_or_cut,
)
from tests.support.staged import trace_model


def low():
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Target(Net):
    def inside(self, hidden):
        with low():
            made = self.middle(hidden)
            with torch.no_grad():
                target = self.middle(hidden).float().sigmoid()
        return hidden * target + made.float()


class Called(Net):
    """By the function, which no block ends."""

    def inside(self, hidden):
        with low():
            torch.set_grad_enabled(False)
            target = self.middle(hidden)
            torch.set_grad_enabled(True)
            made = self.middle(hidden)
        return target.float() + made.float()


class OnAgain(Net):
    """All of it without gradients, but for a part."""

    def inside(self, hidden):
        with torch.no_grad(), low():
            target = self.middle(hidden)
            with torch.enable_grad():
                made = self.middle(hidden)
            target = target + self.middle(hidden)
        return hidden + target.float() + made.float()


class Across(Net):
    """An inner autocast, and another one afterwards in which gradients are on."""

    def inside(self, hidden):
        with low(), torch.no_grad():
            target = self.middle(hidden)
            with torch.autocast("cpu", enabled=False):
                target = target.float() + self.middle(hidden)
        with low():
            return hidden + target + self.middle(hidden).float()


class Decorated(Net):
    @torch.no_grad()
    def target(self, hidden):
        return self.middle(hidden)

    def inside(self, hidden):
        with low():
            return self.middle(hidden).float() + self.target(hidden).float()


@pytest.mark.sweep(of=5)
@pytest.mark.parametrize("kind", [Target, Called, OnAgain, Across, Decorated])
def test_what_no_grad_holds_has_no_gradient(kind):
    """Bug: it had, and all gradients before it were off, by up to 40 %."""
    assert unlike_whole_or_cut(built(kind), cuts=["relu/1"]) == []


def test_nodes_say_so():
    nodes = trace_model(built(Target), inputs, square).graph.nodes
    assert [node.grad for node in nodes if node.short == "linear"] == [True, True, False, True]
