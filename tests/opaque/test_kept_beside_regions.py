"""What a model keeps or moves by itself, beside a call of it that runs as it is."""

import copy

import pytest
import torch
from torch import nn

from tests.support.long import chosen
from tests.support.odd_models import Net, built, inputs, refusal, regions_of, square, traced, unlike
from tests.support.staged import trace_model


class Grid(Net):
    """As YOLO's layer has it: a table for a size, made in the first call of that size."""

    def begin(self):
        self.size = 0

    def inside(self, hidden):
        if self.size != hidden.shape[-1]:
            self.size = hidden.shape[-1]
            self.grid = torch.arange(self.size).float() / self.size
        return torch.vmap(torch.sin)(self.middle(hidden)) + self.grid


class GridInside(Net):
    """The table is the own one of the call that runs as it is."""

    def begin(self):
        self.table = None

    def inside(self, hidden):
        return self.bent(self.middle(hidden))

    def bent(self, hidden):
        if self.table is None:
            self.table = torch.linspace(0, 1, hidden.shape[-1])
        return torch.vmap(torch.sin)(hidden) * self.table


class Follows(Net):
    """A teacher that each forward moves."""

    def begin(self):
        self.teacher = copy.deepcopy(self.middle).requires_grad_(False)

    def inside(self, hidden):
        for own, other in zip(self.teacher.parameters(), self.middle.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.detach(), alpha=0.1)
        self.last = hidden
        return torch.vmap(torch.sin)(self.middle(hidden)) - self.teacher(hidden)


@pytest.mark.parametrize("kind", chosen([Grid, GridInside, Follows], now=(Grid,)))
def test_a_table_of_a_first_call_and_a_teacher_go_with_it(kind):
    """Bug: each was refused as a model that keeps something and computes something else."""
    assert regions_of(kind)
    assert unlike(built(kind), traced=traced(kind)) == []


class FirstRows(Net):
    """Normed for good by the first rows that come, as an ActNorm is."""

    def begin(self):
        self.scale = None

    def inside(self, hidden):
        if self.scale is None:
            self.scale = hidden.detach().std()
        return torch.vmap(torch.sin)(self.middle(hidden)) / self.scale


class NumbersOnce(Net):
    """Random numbers of a first call."""

    def begin(self):
        self.noise = None

    def inside(self, hidden):
        if self.noise is None:
            self.noise = torch.rand(8)
        return torch.vmap(torch.sin)(self.middle(hidden)) * self.noise


@pytest.mark.parametrize(("kind", "name"), [(FirstRows, "scale"), (NumbersOnce, "noise")])
def test_what_depends_on_the_first_rows_or_on_chance_is_refused(kind, name):
    """Each replica would have another one."""
    assert f"keeps {name} from one call to the next" in refusal(kind)


@pytest.mark.long
def test_planning_leaves_a_teacher_where_it_was():
    model = built(Follows)
    before = copy.deepcopy(model.state_dict())
    trace_model(model, inputs, square)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class ZeroPadded(Net):
    """As LoRA's merged projections have it: a mask that is made in the dtype of a weight."""

    def begin(self):
        self.part = nn.Parameter(torch.randn(6, 8))
        self.trained = self.middle.weight.new_zeros(8, dtype=torch.bool)
        self.trained[torch.tensor([0, 1, 2, 4, 5, 7])] = True
        self.scale = torch.full_like(self.middle.bias, 0.5)

    def inside(self, hidden):
        padded = hidden.new_zeros(8, 8)
        padded[self.trained] = self.part
        return hidden @ padded * self.scale


def test_a_call_reads_what_a_constructor_made_like_a_weight():
    """Bug: it had no values, as the weight, and the call failed in backward."""
    assert regions_of(ZeroPadded)
    assert unlike(built(ZeroPadded), traced=traced(ZeroPadded)) == []
