"""A loss that reads more than outputs: the model's parameters, its attributes, buffers of its own.

Each of these was once trained on wrong gradients without a word, or refused with a sentence that
led nowhere.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from autopipe.errors import CaptureError
from tests.support.odd_models import (
    MICRO_BATCHES,
    ROWS,
    Net,
    built,
    eager,
    inputs,
    square,
    unlike,
)
from tests.support.staged import differences, staged_step, trace_model


def test_a_loss_that_reads_the_models_parameters_trains_them():
    """Bug: the graph has a copy of the model with fake parameters, the loss holds the model itself.

    Its parameters came into the graph as constants: gradients without the penalty's part (49 % too
    small), and a penalty that stayed what it was when the model was traced.
    """
    model = built(Net)

    def penalised(outputs, batch):
        return square(outputs, batch) + 0.1 * sum(p.norm() for p in model.parameters())

    assert unlike(model, penalised) == []


VIEWS = {
    "the transpose": lambda model: model.middle.weight.detach().T,
    "the transpose, with a gradient": lambda model: model.middle.weight.T,
    "a row": lambda model: model.middle.weight.detach()[0],
    "half of a buffer": lambda model: model.scales[:4],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_loss_with_a_view_that_was_made_before_is_refused(view):
    """Bug: the view was taken for the whole tensor, and of a transpose all values were others."""

    class Scaled(Net):
        def begin(self):
            self.register_buffer("scales", torch.arange(8.0))

        def inside(self, hidden):
            return self.middle(hidden) * self.scales

    model = built(Scaled)
    before = view(model)

    def weighted(outputs, batch):
        return square(outputs, batch) * before.square().mean()

    with pytest.raises(CaptureError, match=r"of_more.py:\d+: a view of the .* is read here"):
        trace_model(model, inputs, weighted)


def test_what_a_loss_has_detached_before_has_no_gradient():
    """Bug: it was taken for the parameter itself, which was trained by it."""
    model = built(Net)
    alias = model.middle.weight.detach()
    views = [p.data for p in model.down.parameters()]

    def beside(outputs, batch):
        near = sum((alias - view.mean()).square().mean() for view in views)
        return square(outputs, batch) + near * model.middle.weight.norm()

    assert unlike(model, beside) == []


@pytest.mark.parametrize("view", [lambda p: p[:], lambda p: p.view(p.shape)], ids=["[:]", "view"])
def test_what_a_loss_has_not_detached_trains_the_parameter(view):
    """Bug: all that was made of a parameter before was taken for what `.detach()` had made, and
    the gradient through it was lost."""
    model = built(Net)
    held = view(model.middle.weight)

    def beside(outputs, batch):
        return square(outputs, batch) + 0.1 * held.square().sum()

    assert unlike(model, beside) == []


def test_a_loss_may_have_other_elements_of_a_parameter_s_memory():
    """Bug: of a tensor whose first half is a buffer the second half was taken for the first."""

    class Scaled(Net):
        def begin(self):
            self.register_buffer("scales", torch.arange(16.0)[:8])

        def inside(self, hidden):
            return self.middle(hidden) * self.scales

    model = built(Scaled)
    others = model.scales.as_strided((8,), (1,), 8)
    assert unlike(model, lambda outputs, batch: square(outputs, batch) * others.mean()) == []


class Centred(Net):
    def begin(self):
        self.centres = nn.Parameter(torch.ones(4))

    def loss(self, outputs, batch):
        return ((outputs - batch["y"] - self.centres) ** 2).mean()


def test_a_loss_that_is_a_method_of_the_model_trains_what_only_it_reads():
    """Bug: the centres, which forward does not read, had no gradient at all."""
    model = built(Centred)
    assert unlike(model, model.loss) == []


def test_a_loss_that_is_a_module_brings_its_buffers():
    """Bug: they were taken for buffers of the model: "Sequential has no attribute `loss`"."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0, 4.0]))

        def forward(self, outputs, batch):
            return (self.weights * (outputs - batch["y"]) ** 2).mean()

    assert unlike(built(Net), Weighted()) == []


def test_a_loss_that_assigns_its_buffer_keeps_the_value():
    """Bug: it was 1 in each micro-batch; only what the model assigns was seen."""

    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.ones(()))

        def forward(self, outputs, batch):
            loss = square(outputs, batch)
            self.mean = 0.5 * self.mean + 0.5 * loss.detach()
            return loss / self.mean

    for cuts in ([], ["relu/1"]):
        trace = trace_model(model := built(Net), inputs, Normalised())
        batch = inputs(ROWS * MICRO_BATCHES)
        found = staged_step(model, trace, batch, cuts, MICRO_BATCHES)
        assert differences(found, eager(model, Normalised()), tolerance=1e-5) == []


def test_a_loss_keeps_what_requires_a_gradient():
    """Bug: the first look ran without gradients, where nothing requires one: "gives an int"."""

    def loss(outputs, batch):
        return sum(t.square().mean() for t in (outputs, batch["y"]) if t.requires_grad)

    assert unlike(built(Net), loss) == []


class LeavesALoss(Net):
    """Leaves a loss of its own in an attribute, as mixtures of experts do."""

    def begin(self):
        self.extra = None

    def inside(self, hidden):
        hidden = self.middle(hidden)
        self.extra = hidden.square().mean()
        return hidden


def test_a_loss_finds_what_forward_has_left_in_an_attribute():
    """Bug: it found nothing, or what an earlier run had left; a copy of the model is traced."""
    model = built(LeavesALoss)
    assert unlike(model, lambda outputs, batch: square(outputs, batch) + 0.1 * model.extra) == []
    assert model.extra.grad_fn is not None, "eager has run; a trace of a copy leaves no mark"


@dataclass
class Layered:
    """As configurations of transformers are whose layers differ."""

    heads: int = 4
    width: int = 8

    def __getattribute__(self, name):
        if name == "heads":
            raise ValueError("ask the configuration of one layer")
        return super().__getattribute__(name)


def test_no_attribute_of_an_object_is_read_that_the_model_does_not_read():
    """Bug: what forward has left was looked for by reading every field."""

    class Configured(LeavesALoss):
        def begin(self):
            super().begin()
            self.config = Layered()

    model = built(Configured)
    assert unlike(model, lambda outputs, batch: square(outputs, batch) + 0.1 * model.extra) == []


class ChangesTheBatch(Net):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


def test_a_batch_that_the_model_changes_in_place_is_changed_for_the_loss_too():
    def loss(outputs, batch):
        batch["y"].mul_(2)
        return square(outputs, batch) + outputs.mean() * batch["x"].mean()

    assert unlike(built(ChangesTheBatch), loss) == []


def test_a_loss_with_a_parameter_is_refused():
    class Learnt(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, outputs, batch):
            return (self.scale * (outputs - batch["y"]) ** 2).mean()

    with pytest.raises(CaptureError, match="the loss has a parameter, 'scale', which is none of"):
        trace_model(built(Net), inputs, Learnt())


class OfFeatures(nn.Module):
    """As a perceptual loss has it: a network that nobody trains compares what it sees."""

    def __init__(self):
        super().__init__()
        self.sees = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        self.eval().requires_grad_(False)

    def forward(self, outputs, batch):
        return square(self.sees(outputs), {"y": self.sees(batch["y"])})


def test_a_loss_may_have_a_network_that_is_not_trained():
    """Bug: refused, "the loss has a parameter, 'sees.0.weight', ... no optimizer is given it"."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loss = OfFeatures()
    assert unlike(built(Net), loss) == []
    graph = trace_model(built(Net), inputs, loss).graph
    assert graph.states["loss.sees.0.weight"].kind == "constant"
    assert type(graph.constants["loss.sees.0.weight"]) is torch.Tensor  # no stage has it to train


def test_a_loss_that_is_half_frozen_is_refused_by_what_is_not():
    loss = OfFeatures()
    loss.sees[3].bias.requires_grad_(True)
    with pytest.raises(CaptureError, match=r"'sees\.3\.bias'") as refused:
        trace_model(built(Net), inputs, loss)
    assert "loss.requires_grad_(False)" in refused.value.hint
