"""Planning runs a few rows through the model and its graph: what no rule foresaw differs here."""

import random

import pytest
import torch
from torch import nn

from autopipe.errors import CaptureError, ModelError
from autopipe.planners.driver import against_eager
from autopipe.planners.driver.outcomes import Outcome, compare
from tests.support.long import chosen
from tests.support.odd_models import Net, built, inputs, planned, refusal, square
from tests.support.staged import trace_model


class Reversing(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: -gradient)
        return hidden


def test_a_gradient_that_only_eager_has_is_refused_at_the_parameter_before_it(monkeypatch):
    """As if a trace had lost a hook once more: the check needs to know nothing of hooks."""
    from autopipe.eager import refused_effects

    monkeypatch.setattr(refused_effects, "_REFUSALS", {})
    said = refusal(built(Reversing))
    assert "4 of its 6 gradients differ in its graph; after 'middle.weight' (" in said
    assert "odd_models.py:" in said and "off by 2 of its largest entry, they agree" in said


class Dropping(Net):
    """Draws a number that no result needs, before dropout: the graph has no node for it."""

    def inside(self, hidden):
        torch.rand(3)
        return nn.functional.dropout(self.middle(hidden), 0.5, self.training)


@pytest.mark.parametrize(
    "precision", chosen(["fp32", "bf16", "bf16-autocast"], now=("bf16-autocast",))
)
def test_dropout_and_any_precision_agree(precision):
    said = []
    planned(built(Dropping), said=said, precision=precision)
    assert not [line for line in said if "not compared" in line]


def test_the_users_module_is_left_as_it_was():
    class Kept(Net):
        def begin(self):
            self.register_buffer("average", torch.zeros(8))
            self.teacher = nn.Linear(8, 8).requires_grad_(False)
            self.calls = []

        def inside(self, hidden):
            self.calls.append(1)
            with torch.no_grad():  # bug: the graph ran on what eager's two calls had left
                self.teacher.weight.mul_(0.9).add_(self.middle.weight, alpha=0.1)
                hidden = hidden + self.teacher(hidden)
            self.average = self.average + 1
            return nn.functional.dropout(self.middle(hidden)) + self.average

    model = built(Kept)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    average, threads, state = model.average, torch.get_num_threads(), torch.get_rng_state()
    planned(model)
    assert model.average is average and model.calls == [] and model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


def test_sparse_gradients_are_compared_as_dense_ones():
    """Bug: planning ended with a list of the kernels that torch has."""

    class Words(Net):
        def begin(self):
            self.words = nn.Embedding(9, 8, sparse=True)
            self.bags = nn.EmbeddingBag(9, 8, sparse=True)

        def inside(self, hidden):
            chosen = hidden.argmax(-1)
            return self.middle(hidden) + self.words(chosen) + self.bags(chosen[:, None])

    planned(built(Words))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_part_is_compared_as_all_others_are():
    """Bug: the names of its buffers were asked for in a way that only nn.Module answers."""

    class Scripted(Net):
        def begin(self):
            self.middle = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))

    said = []
    planned(built(Scripted), said=said)
    assert not [line for line in said if "not compared" in line]


def test_a_large_model_is_not_run(monkeypatch):
    monkeypatch.setattr(against_eager, "_outcomes", None)
    monkeypatch.setattr(against_eager, "MOST_FLOPS", 0)
    planned(built(Net))


class HalfMade(Net):
    """Its second weight is what memory held."""

    def begin(self):
        self.projection = nn.Parameter(torch.empty(8, 8))

    def inside(self, hidden):
        return self.middle(hidden) @ self.projection


def test_a_weight_that_nobody_initialises_is_told_of_and_compared_with_numbers_of_its_own():
    """Bug: it was compared with whatever memory held, often nan, and then equal to all."""
    said = []
    planned(lambda: built(HalfMade), said=said)
    assert [line for line in said if "torch.empty" in line] == [
        "model() makes the parameter 'projection' and writes no values into all of it, as by "
        "torch.empty alone: what its memory held would be its values, others on each rank; "
        "a run refuses that, but for one from --weights"
    ]


class Empty(Reversing):
    """In a condition it is False, as a container without entries is."""

    def __len__(self):
        return 0


def test_a_model_of_no_length_is_compared_too(monkeypatch):
    """Bug: it was taken for none. `torch.compile`'s module refuses to be asked for a length."""
    from autopipe.eager import refused_effects

    monkeypatch.setattr(refused_effects, "_REFUSALS", {})
    assert "gradients differ in its graph" in refusal(built(Empty))
    planned(lambda: torch.compile(built(Net)))


def test_a_module_that_was_made_before_the_call():
    """Bug: a module of the whole file, or of a cached model(), ended in torch's error: the first
    call had made it one without values."""
    net = built(Net)
    with pytest.raises(ModelError) as refused:
        planned(lambda: net)
    assert str(refused.value) == (
        "model() gives the same 'up.weight' each time: the module was made before the call, or "
        "is kept from the first one, and each rank builds it to have its own part\n"
        "hint: make the module inside of model(), anew in each call; what else needs it, as a loss "
        "that is its method, finds it in a global that model() sets"
    )


@pytest.mark.parametrize(
    ("of_model", "of_graph"),
    [
        ([torch.inf, 1.0], [torch.inf, 2.0]),
        ([1.0, 1.0], [torch.nan, 1.0]),
        ([1 + 1j, 1j], [1 + 1j, 2j]),
    ],
)
def test_numbers_that_are_none_and_imaginary_ones_hide_no_difference(of_model, of_graph):
    """Bug: of a tensor nothing was compared if an entry of the model's was infinite, nor any that
    was none in the graph's alone, nor imaginary parts."""

    def outcome(gradient):
        gradients = [{"up.weight": torch.tensor(gradient)}]
        return Outcome([torch.ones(1)], gradients, [{}])

    traced = trace_model(built(Net), inputs, square)
    compare(traced, outcome(of_model), outcome(of_model), 1e-4)
    with pytest.raises(CaptureError, match="1 of its 1 gradients differ"):
        compare(traced, outcome(of_model), outcome(of_graph), 1e-4)


def test_gradients_that_autograd_leaves_conjugated_are_compared():
    """Bug: that of `self.weight.conj() * x`, a little off, ended planning with torch's words."""

    def outcome(gradient):
        return Outcome([torch.ones(1)], [{"up.weight": torch.tensor(gradient).conj()}], [{}])

    traced = trace_model(built(Net), inputs, square)
    compare(traced, outcome([1 + 1j]), outcome([1 + 1.00001j]), 1e-4)
    with pytest.raises(CaptureError, match="1 of its 1 gradients differ"):
        compare(traced, outcome([1 + 1j]), outcome([1 + 2j]), 1e-4)


def test_a_second_micro_batch_that_is_no_number_differs_from_none():
    """Bug: SAM was refused. Its weights, moved by a step, give nan; of the gradients one is nan but
    for a 0, which is a 0 by its graph too."""
    gradients = [{"up.weight": torch.tensor(entries)} for entries in ([1.0, 1.0], [0.0, torch.nan])]
    found = Outcome([torch.ones(1), torch.tensor([torch.nan])], gradients, [{}, {}])
    compare(trace_model(built(Net), inputs, square), found, found, 1e-4)


class Rejecting(Net):
    """Draws until a number will do, as a sampler of von Mises' or a truncated distribution does."""

    def inside(self, hidden):
        while (drawn := torch.rand(())) < 0.9:
            pass
        return self.middle(hidden) * drawn


def test_a_loop_that_draws_until_a_number_will_do_ends():
    """Bug: each draw of the comparison gave the same number, and planning never ended."""
    plan = planned(built(Rejecting), pp=2)
    assert [region.name for region in plan.regions] == ["inside()"]


class RejectingInPython(Net):
    def inside(self, hidden):
        while (drawn := random.random()) < 0.9:
            pass
        return self.middle(hidden) * drawn


def test_a_loop_that_draws_from_a_generator_of_pythons_ends_and_is_refused():
    assert "random numbers that are not torch's" in refusal(built(RejectingInPython))
