"""A model whose rows depend on one another before its loss begins is refused for a batch's loss."""

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import ModelError
from tests.support.inprocess import machine

WIDTH = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.between(self.first(x)))

    def between(self, x):
        return x.relu()


class Beside(Net):
    """Each row has some of the row before it, so the first of a micro-batch has another one's."""

    def between(self, x):
        return x + x.roll(1, 0)


class Dropped(Beside):
    """The losses of two draws cannot be compared."""

    def between(self, x):
        return nn.functional.dropout(super().between(x), 0.1)


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, x):
        return self.norm(x)


def spread(outputs, batch):
    return -outputs.var(0).mean()


def planned(model):
    said = []
    plan = autopipe.plan(
        model,
        lambda rows: {"x": torch.randn(rows, WIDTH)},
        loss=spread,
        loss_over="batch",
        cluster=machine(1),
        batch_size=8,
        micro_batches=4,
        say=said.append,
    )
    return plan, [line for line in said if line.startswith("loss:") or "makes a row" in line]


def test_rows_by_themselves_are_planned_in_two_passes():
    plan, said = planned(Net)
    assert said == []
    assert (plan.loss_over, plan.forwards) == ("batch", 2)
    assert plan.loss_seconds > 0
    (stage,) = (stage.predicted for stage in plan.stages)
    assert stage.spent.recompute > 0, "the first forward is computed again"


def test_rows_that_see_each_other_are_refused():
    with pytest.raises(ModelError, match="what it makes of a row depends on the rows beside it"):
        planned(Beside)


def test_beside_random_numbers_they_are_named():
    compared, named = planned(Dropped)[1]
    assert "each micro-batch draws its own random numbers" in compared
    assert "roll() makes a row depend on the other rows of its micro-batch" in named


def test_batch_norm_keeps_the_statistics_of_a_micro_batch_and_is_told():
    compared, named = planned(Normed)[1]
    assert "a batch norm has the statistics of a micro-batch" in compared
    assert "batch_norm() makes a row depend on the other rows of its micro-batch" in named
