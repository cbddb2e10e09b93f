"""Tensors of modules that torch does not know: a teacher in a list, which follows in forward.

Planning runs a model several times. A graph has the teacher as it was before all of these runs.
"""

import copy

import pytest
import torch
from torch import nn

from autopipe.eager import registered
from tests.support.long import chosen
from tests.support.odd_models import Net, built, planned, refusal, unlike


class Teacher(Net):
    """`follow(self, old, new)` moves a weight of the teacher, which is in a plain list."""

    def begin(self):
        self.teacher = [copy.deepcopy(self.middle).requires_grad_(False)]

    def inside(self, hidden):
        (teacher,) = self.teacher
        with torch.no_grad():
            self.follow(teacher)
            aim = teacher(hidden)
        return self.middle(hidden) * aim

    def follow(self, teacher):
        for old, new in zip(teacher.parameters(), self.middle.parameters(), strict=True):
            self.move(old, new)


class InTwoWrites(Teacher):
    """Bug: the first write was made for good in each run of a plan, and none of them undone."""

    def move(self, old, new):
        old.mul_(0.9).add_(new, alpha=0.1)


class ByItsData(Teacher):
    """Bug: without a word for a large model; its graph had moved another copy of the teacher."""

    def move(self, old, new):
        old.data = 0.9 * old.data + 0.1 * new.data


class ByItsStateDict(Teacher):
    def follow(self, teacher):
        now = self.middle.state_dict()
        for name, old in teacher.state_dict().items():
            old.mul_(0.9).add_(now[name], alpha=0.1)


class Average:
    """As data2vec has it: no module, so that no state dict has the teacher."""

    def __init__(self, of):
        self.model = copy.deepcopy(of).requires_grad_(False)


class InAnObject(InTwoWrites):
    def begin(self):
        self.average = Average(self.middle)

    @property
    def teacher(self):
        return [self.average.model]


class Normed(Net):
    """Batch norm writes its statistics without a word to torch's count of writes."""

    def begin(self):
        self.norm = [nn.BatchNorm1d(8).requires_grad_(False)]

    def inside(self, hidden):
        return self.middle(hidden) * self.norm[0](hidden.detach())


class FrozenInADict(Net):
    def begin(self):
        self.kept = {"mean": nn.Parameter(torch.zeros(8), requires_grad=False)}

    def inside(self, hidden):
        hidden = self.middle(hidden)
        with torch.no_grad():
            self.kept["mean"].mul_(0.9).add_(hidden.mean(0))
        return hidden - self.kept["mean"]


KINDS = [InTwoWrites, ByItsData, ByItsStateDict, InAnObject, Normed, FrozenInADict]


@pytest.mark.parametrize("kind", chosen(KINDS, now=(ByItsData, InAnObject, Normed)))
def test_a_hidden_module_moves_in_a_graph_as_in_the_model(kind, size):
    model = built(kind)
    planned(model, loss_over="micro-batch")
    assert unlike(model) == []  # the teacher is where it was before planning


def test_a_write_of_a_hidden_module_too_large_to_be_copied_is_refused(monkeypatch):
    monkeypatch.setattr(registered, "MOST_IN_MODULES", 10)  # a bias has 8 elements
    assert (
        "forward writes teacher.weight, a tensor of 64 elements that is neither a parameter nor a "
        "buffer of the model; planning runs the model several times"
    ) in refusal(built(InTwoWrites))


def test_a_hidden_module_whose_parameters_have_no_memory_is_passed_over():
    """Bug: a pipe of a script under ZeRO-3 is one, and a second trace ended in a SIGSEGV."""
    model = built(Net)
    model.pipes = [nn.Linear(8, 8)]
    model.pipes[0].weight.untyped_storage().resize_(0)
    named = [name for name, _ in registered.named_tensors_of(model)]
    assert [name.rpartition(".")[2] for name in named] == ["bias"]
