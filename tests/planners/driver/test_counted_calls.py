"""A model or a loss that counts its calls in Python, and changes with the count, is refused.

Two calls of such a model may do the same: planning looks ahead, at calls that a training makes.
"""

from functools import partial

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import CaptureError
from tests.support.inprocess import machine
from tests.support.long import chosen
from tests.support.odd_models import Net, built, planned, refusal, square

CALLS = []


@pytest.mark.long
def test_a_loss_that_counts_its_calls_is_refused():
    def loss(outputs, batch):
        CALLS.append(None)
        return square(outputs, batch) * len(CALLS)

    assert "it keeps" in refusal(built(Net), loss)


class WarmsUp(nn.Module):
    """Another term after 60 calls."""

    def __init__(self):
        super().__init__()
        self.step = 0

    def forward(self, outputs, batch):
        self.step += 1
        more = outputs.abs().mean() if self.step > 60 else 0.0
        return square(outputs, batch) + more


STEP, CRITERION = 0, WarmsUp()


def warms_up(outputs, batch):
    global STEP
    STEP += 1
    return square(outputs, batch) + (outputs.abs().mean() if STEP > 60 else 0.0)


@pytest.mark.parametrize(
    ("loss", "kept"),
    [
        pytest.param(WarmsUp(), "step", marks=pytest.mark.long),
        pytest.param(
            lambda outputs, batch: CRITERION(outputs, batch), "step", marks=pytest.mark.long
        ),
        pytest.param(
            partial(lambda criterion, *given: criterion(*given), WarmsUp()),
            "step",
            marks=pytest.mark.long,
        ),
        (warms_up, f"{__name__}.STEP"),
    ],
)
def test_a_loss_that_warms_up_is_refused_wherever_it_counts(loss, kept):
    """Bug: planned without a word, and trained for good as in its first 60 calls."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))  # none of its code is in this file

    def rows(number):
        return {"input": torch.ones(number, 4), "y": torch.ones(number, 4)}

    with pytest.raises(CaptureError, match="more calls, or gradients are others") as error:
        autopipe.plan(model, rows, loss=loss, cluster=machine(2), batch_size=8)
    assert f"it keeps {kept}\n" in str(error.value)


class Tallies(nn.Module):
    """A metric, which adds up for a log."""

    def __init__(self):
        super().__init__()
        self.rows, self.total = 0, torch.zeros(())

    def forward(self, outputs):
        self.rows += len(outputs)
        self.total = self.total + outputs.detach().sum()


METRIC = Tallies()


def test_a_metric_beside_a_loss_is_no_obstacle():
    """Bug: refused for something "outside of attributes and variables"."""

    def loss(outputs, batch):
        METRIC(outputs)
        return square(outputs, batch)

    planned(built(Net), loss)
    assert METRIC.rows == 0, "planning leaves it as it was"


class Warm(Net):
    """Does otherwise once it has been called more often than planning calls it."""

    def begin(self):
        self.calls = 0

    def inside(self, hidden):
        self.calls += 1
        return self.middle(hidden) * (2 if self.calls > 500 else 1)


class WarmByAnObject(Net):
    class Schedule:
        def __init__(self):
            self.seen = []

        def over(self):
            self.seen.append(1)
            return len(self.seen) > 50

    def begin(self):
        self.schedule = self.Schedule()

    def inside(self, hidden):
        return self.middle(hidden) * (2 if self.schedule.over() else 1)


@pytest.mark.parametrize("kind", chosen([Warm, WarmByAnObject], now=(Warm,)))
def test_a_warm_up_that_is_counted_in_python_is_refused(kind):
    """Bug: two calls do the same, and a run was trained on for good as if it were warming up."""
    said = refusal(built(kind))
    assert f"on the same rows after {498 if kind is Warm else 97} more calls" in said
    assert ("; it keeps calls" in said) == (kind is Warm)


class Phase(Warm):
    def inside(self, hidden):
        self.calls += 1
        return self.middle(hidden) * (2 if 3 <= self.calls < 8 else 1)


class EachFourth(Warm):
    def inside(self, hidden):
        self.calls += 1
        return self.middle(hidden) * (2 if self.calls % 4 == 0 else 1)


class EachHundredth(Warm):
    def inside(self, hidden):
        self.calls += 1
        return self.middle(hidden) * (2 if self.calls % 100 == 0 else 1)


class EachSixtyFourth(Warm):
    def inside(self, hidden):
        self.calls += 1
        return self.middle(hidden) * (1 if self.calls % 64 else 2)


class AfterHundreds(Warm):
    def inside(self, hidden):
        self.calls += 1
        return self.middle(hidden) * (2 if 200 < self.calls < 800 else 1)


@pytest.mark.sweep(of=5)
@pytest.mark.parametrize("kind", [Phase, EachFourth, EachHundredth, EachSixtyFourth, AfterHundreds])
def test_a_phase_and_what_comes_again_each_so_many_calls_are_refused(kind):
    """Bugs: a count was looked at 10, 1000 and 100 000 calls ahead, and nowhere between.

    Then not where the code itself has a number that it waits for.
    """
    assert "more calls, or gradients are others; it keeps calls" in refusal(built(kind))
