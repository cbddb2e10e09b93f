"""A value that a model keeps from one micro-batch to the next is refused by its holder's name.

The graph is that of a first call. Planning compares a second micro-batch too, whose results change
where the model reads what it has kept. A value that is kept and never read is no obstacle.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autopipe.planners.driver import against_eager
from tests.support.odd_models import Net, built, planned, refusal


class Counter(Net):
    def begin(self):
        self.count = 0

    def inside(self, hidden):
        self.count += 1
        return self.middle(hidden) * self.count


class Annealed(Net):
    """Bug: one call changes too little of the loss to be told from rounding."""

    def begin(self):
        self.step = 0

    def inside(self, hidden):
        self.step += 1
        return self.middle(hidden) / (1 - self.step / 50_000)


class Schedule:
    def __init__(self):
        self.calls = 0

    def temperature(self):
        self.calls += 1
        return 1 - self.calls / 50_000


class AnnealedByAnObject(Net):
    """Bug: the attribute is the same object, which has changed."""

    def begin(self):
        self.schedule = Schedule()

    def inside(self, hidden):
        return self.middle(hidden) / self.schedule.temperature()


class Previous(Net):
    def begin(self):
        self.mean = torch.zeros(8)

    def inside(self, hidden):
        hidden = self.middle(hidden) + self.mean
        self.mean = hidden.detach().mean(0)
        return hidden


class First(Net):
    def begin(self):
        self.cache = None

    def inside(self, hidden):
        if self.cache is None:
            self.cache = hidden.detach().mean(0)
        return self.middle(hidden) + self.cache


class FirstInABuffer(Net):
    """In no checkpoint, and of another shape than it was built with: a cache as well."""

    def begin(self):
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def inside(self, hidden):
        if len(self.table) != hidden.shape[1]:
            self.table = hidden.detach().mean(0)
        return self.middle(hidden) + self.table


KEPT = {
    Counter: "count",
    Annealed: "step",
    AnnealedByAnObject: "schedule",
    Previous: "mean",
    First: "cache",
    FirstInABuffer: "table",
}


@pytest.mark.sweep(of=6)
@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.__name__)
def test_what_is_kept_in_an_attribute_is_refused_by_its_name(kind):
    """The graph is that of a first call; from the second micro-batch on it would be another one."""
    said = refusal(built(kind))
    assert " in a second micro-batch " in said
    assert "which is that of a first call" in said
    assert f"it keeps {KEPT[kind]}\nhint: keep it in a buffer" in said


@pytest.mark.long  # test_holders.py tells it of other kinds
@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.__name__)
def test_it_is_refused_by_its_name_where_the_model_is_too_large_to_be_run(kind, monkeypatch):
    monkeypatch.setattr(against_eager, "MOST_BYTES", 0)
    assert f"the model keeps {KEPT[kind]} from one call to the next" in refusal(built(kind))


class Noted(Net):
    def inside(self, hidden):
        self.last = self.middle(hidden)
        self.seen = [*getattr(self, "seen", []), float(hidden.shape[1])]
        return self.last


@pytest.mark.long
def test_what_is_kept_and_not_read_is_no_obstacle(monkeypatch):
    planned(built(Noted))
    monkeypatch.setattr(against_eager, "MOST_BYTES", 0)
    planned(built(Noted))


class LooksOnce(Net):
    """Bug: its first call asks for a dtype, and makes no other call of torch for it."""

    def begin(self):
        self.config = SimpleNamespace(problem=None)

    def inside(self, hidden):
        if self.config.problem is None:
            self.config.problem = "regression" if hidden.dtype is torch.float32 else "classes"
        return self.middle(hidden)


class LooksOnceBesideANorm(Net):
    """Bug: its second call counts from 1 in a buffer, as its graph does."""

    def begin(self):
        self.config, self.norm = SimpleNamespace(problem=None), nn.BatchNorm1d(8)

    def inside(self, hidden):
        self.config.problem = "regression"
        return self.norm(self.middle(hidden))


LOOKS = [LooksOnce, LooksOnceBesideANorm]


@pytest.mark.long
@pytest.mark.parametrize("kind", LOOKS, ids=lambda kind: kind.__name__)
def test_what_a_first_call_writes_into_a_config_is_no_obstacle(kind, monkeypatch):
    """Models of transformers note what kind of labels they were given."""
    planned(built(kind))
    monkeypatch.setattr(against_eager, "MOST_BYTES", 0)
    planned(built(kind))


class TableOfWeights(Net):
    """Keeps what its first call makes of weights."""

    def begin(self):
        self.table = None

    def inside(self, hidden):
        if self.table is None:
            self.table = 4 * self.middle.weight.detach()
        return self.middle(hidden) @ self.table


class TableOfFrozenWeights(TableOfWeights):
    def begin(self):
        super().begin()
        self.middle.requires_grad_(False)


def test_a_table_that_a_first_call_makes_of_weights_is_refused_if_they_are_trained():
    """Bug: weights were the same in both micro-batches, and the table was none of old weights."""
    said = refusal(built(TableOfWeights))
    assert "its loss in a second micro-batch is" in said and "it keeps table" in said
    planned(built(TableOfFrozenWeights))
