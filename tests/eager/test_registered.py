"""What a model registers in its first call: a parameter is refused by name, a buffer is a cache."""

import copy
import inspect

import pytest
import torch
from torch import nn

from autopipe.planners.driver import against_eager
from tests.support.long import chosen
from tests.support.odd_models import Net, built, inputs, planned, refusal, square, unlike
from tests.support.staged import trace_model


class ByItself(Net):
    def begin(self):
        self.scale = None

    def inside(self, hidden):
        if self.scale is None:
            self.scale = nn.Parameter(torch.ones(hidden.shape[-1]))
        return self.middle(hidden) * self.scale


class Registered(Net):
    def inside(self, hidden):
        if not hasattr(self, "scale"):
            self.register_parameter("scale", nn.Parameter(torch.ones(8)))
        return self.middle(hidden) * self.scale


class InAModule(Net):
    def begin(self):
        self.layers = nn.ModuleList()

    def inside(self, hidden):
        if not self.layers:
            self.layers.append(nn.Sequential(nn.Linear(hidden.shape[-1], 8), nn.ReLU()))
        return self.layers[0](hidden)


@pytest.mark.parametrize(
    "kind, name", [(ByItself, "scale"), (Registered, "scale"), (InAModule, "layers.0.0.weight")]
)
def test_a_parameter_that_the_first_call_makes_is_refused_by_name(kind, name):
    """Bug: "reads .grad_fn of a tensor", which registering a parameter does, or a KeyError.

    Whether it is trained depends on when the optimizer is made, which no model says.
    """
    told = refusal(built(kind))
    assert f"test_registered.py:{_line(kind)}: forward makes the parameter {name!r}" in told
    assert "hint: make it in __init__, or call the model once" in told


def _line(kind):
    """Where the parameter is made."""
    lines, first = inspect.getsourcelines(kind)
    return next(n for n, line in enumerate(lines, first) if "nn.P" in line or "nn.S" in line)


@pytest.mark.parametrize(
    "kind",
    chosen([ByItself, Registered, InAModule], now=(Registered,)),
)
def test_it_is_planned_once_the_model_was_called_as_the_hint_says(kind):
    def called():
        net = kind()
        with torch.no_grad():
            net(inputs(2)["x"])
        return net

    assert unlike(called()) == []
    planned(called)


class Anew(Net):
    def begin(self):
        self.scale = nn.Parameter(torch.ones(8))

    def inside(self, hidden):
        self.scale = nn.Parameter(self.scale.detach() * 0.9)
        return self.middle(hidden) * self.scale


def test_a_parameter_in_the_place_of_another_is_refused():
    """Bug: it was refused for a .grad_fn that no line of the user's reads."""
    assert "forward puts another parameter in the place of 'scale'" in refusal(built(Anew))


class Forgotten(Net):
    def inside(self, hidden):
        return nn.LayerNorm(8)(self.middle(hidden))


def test_a_module_that_forward_makes_and_forgets_is_none_of_the_models():
    assert unlike(built(Forgotten)) == []


class Table(Net):
    def inside(self, hidden):
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(8.0).sin())
        return self.middle(hidden) + self.table


class Average(Net):
    def inside(self, hidden):
        if not hasattr(self, "average"):
            self.register_buffer("average", torch.zeros(8))
        hidden = self.middle(hidden)
        self.average.mul_(0.9).add_(hidden.detach().mean(0))
        return hidden + self.average


@pytest.mark.long
def test_a_buffer_that_the_first_call_registers_is_a_cache():
    assert unlike(built(Table)) == ["table"], "the model keeps it, a graph makes it each time"
    assert trace_model(built(Table), inputs, square).unsteady == ()


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("most", [against_eager.MOST_FLOPS, 0])
def test_a_buffer_that_the_first_call_registers_and_each_call_writes_is_refused(monkeypatch, most):
    """Bug: of a model too large to be run while planning each micro-batch began with zeros,
    without a word: a buffer that was not there before was no change."""
    monkeypatch.setattr(against_eager, "MOST_FLOPS", most)
    assert "average" in refusal(built(Average))


class Copied(Net):
    """A frozen copy of a layer beside it, as of a teacher or a baseline."""

    def inside(self, hidden):
        frozen = copy.deepcopy(self.middle).requires_grad_(False)
        return self.middle(hidden) - 0.5 * frozen(hidden)


class CopiedTwice(Net):
    """One with a gradient of its own, which nobody reads, and one of both uses of a layer."""

    def inside(self, hidden):
        both = copy.deepcopy(nn.Sequential(self.middle, self.middle))
        assert both[0].weight is both[1].weight
        return self.middle(hidden) - copy.deepcopy(self.middle)(hidden) * both(hidden).mean(1, True)


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("kind", [Copied, CopiedTwice])
def test_a_copy_that_forward_makes_has_the_values_alone(kind):
    """Bug: it was said to freeze a parameter of the model's, or to read a clock."""
    assert unlike(built(kind)) == []
    assert not trace_model(built(kind), inputs, square).regions
