"""What a call that runs as it is writes, or sets for other code, in some micro-batches alone.

Planning measures calls on the first rows. A class, a code or an expert may have no row among them.
"""

import pytest
import torch
from torch import nn

from autopipe.errors import ModelError
from tests.support.odd_models import Net, built, inputs, square, traced, unlike, unlike_whole_or_cut
from tests.support.staged import trace_model

CLASSES = 3


def classes(hidden):
    """0 or 1 with the weights that a model has first; 2 as soon as it is `trained`."""
    total = hidden.detach().sum(1)
    return (total > total.mean()) + 1 * (total > 50)


def trained(model):
    """The model with other weights, as if it had been trained so far."""
    nn.init.constant_(model.up.bias, 100.0)
    nn.init.constant_(model.middle.bias, 100.0)
    return model


class Prototypes(Net):
    """A mean of each class, moved where a class has rows."""

    def begin(self):
        self.register_buffer("means", torch.zeros(CLASSES, 8))

    def forward(self, x):
        hidden = self.middle(self.up(x).relu())
        own = classes(hidden)
        for number in range(CLASSES):
            mine = own == number
            if mine.any():
                self.means[number] = self.means[number] / 2 + hidden[mine].detach().mean(0)
        return self.down(hidden + torch.cdist(hidden, self.means).sum(1, keepdim=True))


class Expert(nn.Module):
    """Its rows through a layer; `rows` counts them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, hidden):
        self.rows = self.rows + len(hidden)
        return self.layer(hidden) / self.rows


class Experts(Net):
    def begin(self):
        self.experts = nn.ModuleList(Expert() for _ in range(CLASSES))

    def inside(self, hidden):
        own, made = classes(hidden), torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            at = (own == number).nonzero().squeeze(1)
            if len(at):
                made = made.index_add(0, at, expert(hidden[at]))
        return made


def test_a_class_that_none_of_the_measured_rows_has():
    """Bug: a call that wrote nothing in the measured rows was no part of the graph, so its class
    kept its first mean for ever. Nothing told so, but a loss that fell otherwise."""
    trace, model = traced(Prototypes), trained(built(Prototypes))
    assert len(trace.regions) == CLASSES
    assert unlike(model, traced=trace) == []
    assert model.means[2].any()


def test_an_expert_that_gets_its_first_row_late():
    """Bug: the buffer that it assigned then was given up at the end of the call."""
    trace, model = traced(Experts), trained(built(Experts))
    (region,) = trace.regions
    assert region.written == tuple(f"experts.{number}.rows" for number in range(CLASSES))
    assert unlike_whole_or_cut(model, traced=trace, cuts=["relu/1"]) == []
    assert model.experts[2].rows > 0


class Rarely(Net):
    """Writes what it never wrote when it was measured; `how` says what."""

    how = "assigned"

    def begin(self):
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(8))

    def inside(self, hidden):
        return self.some(self.middle(hidden), hidden[:, 0] + 1)

    def some(self, hidden, score):
        picked = hidden[score > 1.0]
        if score.max() > 50:
            if self.how == "assigned":
                self.calls = self.calls + 1
            elif self.how == "in place":
                self.last[0] = 3.0
            else:
                score.zero_()
        return hidden + picked.sum() * 0.1 * (self.calls + self.last.sum())


@pytest.mark.parametrize(
    "how, named", [("assigned", "'calls'"), ("in place", "'last'"), ("given", "the argument 1")]
)
def test_another_write_than_planned_is_an_error_of_that_micro_batch(how, named):
    """Bug: what a call assigned for the first time in a later micro-batch was lost."""
    model = built(Rarely)
    model.how = how
    trace = trace_model(model, inputs, square)
    assert [region.name for region in trace.regions] == ["some()"]
    with pytest.raises(ModelError, match=rf"some\(\), .* writes {named} in this micro-batch"):
        unlike_whole_or_cut(trained(model), traced=trace, cuts=["relu/1"])


class SetsANumber(Net):
    """How many rows were chosen, in an attribute that other code reads."""

    def begin(self):
        self.chosen = 0

    def inside(self, hidden):
        hidden = self.choose(self.middle(hidden))
        return hidden * (1 + self.chosen)

    def choose(self, hidden):
        picked = hidden[hidden[:, 0] > 0.1]
        self.chosen = 2
        return hidden + picked.sum()


class SetsAFlag(Net):
    """A part is put into evaluation by the call, and called after it."""

    def begin(self):
        self.norm = nn.BatchNorm1d(8)

    def inside(self, hidden):
        return self.norm(self.choose(self.middle(hidden)))

    def choose(self, hidden):
        self.norm.eval()
        return hidden + hidden[hidden[:, 0] > 0.1].sum()


class SetsForItself(Net):
    """A count that only a log reads, and the last rows."""

    def begin(self):
        self.calls, self.counts = 0, []

    def inside(self, hidden):
        return self.choose(self.middle(hidden))

    def choose(self, hidden):
        self.last = hidden[hidden[:, 0] > 0.1]
        self.calls += 1
        self.counts.append(len(self.last))
        return hidden + self.last.sum()


@pytest.mark.parametrize(
    "kind, region",
    [(SetsANumber, "inside()"), (SetsAFlag, "inside()"), (SetsForItself, "choose()")],
)
def test_what_a_call_sets_for_other_code_widens_it(kind, region):
    """Bug: the code after it was traced with the value before the call. Of small models planning
    said that they are not what their graphs compute; large ones were trained otherwise."""
    assert [found.name for found in traced(kind).regions] == [region]
    assert unlike_whole_or_cut(built(kind), traced=traced(kind), cuts=["relu/1"]) == []


class SetsRarely(Net):
    """Leaves in `how` what none of the measured rows made it leave."""

    how = "number"

    def begin(self):
        self.number, self.tensor, self.items = 0, torch.zeros(()), []
        self.norm = nn.BatchNorm1d(8)

    def inside(self, hidden):
        self.items.clear()
        given = []
        hidden = self.norm(self.choose(self.middle(hidden), given))
        return hidden * (1 + self.number) + self.tensor + sum(self.items) + sum(given)

    def choose(self, hidden, given):
        if (classes(hidden) >= 2).any():
            if self.how == "number":
                self.number = 3
            elif self.how == "tensor":
                self.tensor = hidden.mean()
            elif self.how == "items":
                self.items.append(hidden.mean())
            elif self.how == "norm.training":
                self.norm.eval()
            else:
                given.append(hidden.mean())
        return hidden + hidden[hidden[:, 0] > 0.1].sum() * 0.1


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("how", ["number", "tensor", "items", "norm.training", "a list"])
def test_what_it_sets_for_the_first_time_is_an_error_of_that_micro_batch(how):
    """Bug: the code after it went on with the value that it was traced with."""
    model = built(SetsRarely)
    model.how = how
    trace = trace_model(model, inputs, square)
    assert [region.name for region in trace.regions] == ["choose()"]
    said = "changes a list or a dict that it is given" if how == "a list" else f"sets '{how}'"
    with pytest.raises(ModelError, match=rf"choose\(\), .* {said} in this micro-batch"):
        unlike_whole_or_cut(trained(model), traced=trace, cuts=["relu/1"])
