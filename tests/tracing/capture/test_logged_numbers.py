"""Numbers that Python reads and nothing depends on, as those of a log, are not checked in a run."""

import logging
import math

import numpy as np
import pytest
import torch
from torch import nn

from autopipe.errors import CaptureError, ModelError
from autopipe.ir.graph import READ_OP
from tests.support.row_graphs import ones
from tests.support.staged import lowered, trace_model


class Logger(nn.Module):
    """`look(self, hidden)` is under test; `self.last` is kept from one call to the next."""

    def __init__(self, look):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.look = look
        self.last = 0.0

    def forward(self, x):
        hidden = self.layer(x)
        found = self.look(self, hidden)
        return hidden.mean() if found is None else (hidden * found).mean()


def logged(look, **options):
    return trace_model(Logger(look), ones, **options)


def kept(m, h):
    m.last = h.norm().item()


def held(m, h):
    m.last = [h.norm().item(), {"max": h.max().item()}]


def printed(m, h):
    print(f"{h.norm().item():.3f} {h.argmax().item():d} {h.norm():.2f}", h.norm().item())


def told(m, h):
    logging.getLogger("tests").info("norm %s", h.norm().item())


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("look", [kept, held, printed, told])
def test_a_number_that_nothing_depends_on_is_not_checked(look, capsys):
    """Nor does it need the weights; and a run reads nothing."""
    found = logged(look, real=None)
    assert found.reads and not any(read.checked for read in found.reads)
    assert READ_OP not in [node.op for node in found.graph.nodes]
    model = Logger(look)
    (module,) = lowered(found, model, [], rows=2)
    for x in (torch.ones(2, 3), torch.zeros(2, 3)):
        (loss,) = module.module(x)
        assert torch.equal(loss, model(x))
        model.zero_grad()
        loss.backward()
        own = model.layer.weight.grad.clone()
        model.zero_grad()
        model(x).backward()
        assert torch.equal(model.layer.weight.grad, own)


def before(m, h):
    """What was kept in the last call is used in this one."""
    scale, m.last = m.last, h.norm().item()
    return 1.0 + scale


USED = {
    "compared": lambda m, h: 2.0 if h.norm().item() > 0 else 1.0,
    "true or not": lambda m, h: 2.0 if h.norm().item() else 1.0,
    "multiplied": lambda m, h: 2 * h.norm().item(),
    "in the graph": lambda m, h: h * h.norm().item(),
    "in a new tensor": lambda m, h: torch.full((3,), h.norm().item()),
    "in torch.tensor": lambda m, h: torch.tensor([h.norm().item()] * 3),
    "in a slice": lambda m, h: h[: h.argmax().item() * 0 + 1],
    "a float": lambda m, h: float(h.norm().item()),
    "math": lambda m, h: math.sqrt(h.norm().item()),
    "isnan": lambda m, h: 1.0 if math.isnan(h.norm().item()) else 2.0,
    "numpy": lambda m, h: float(np.sqrt(h.norm().item())),
    "the largest": lambda m, h: max(h.norm().item(), 1e-3),
    "rounded": lambda m, h: round(h.norm().item(), 1),
    "a method": lambda m, h: 1.0 if h.norm().item().is_integer() else 2.0,
    "a key": lambda m, h: {0.5: 2.0}.get(h.norm().item(), 1.0),
    "the next call": before,
}


@pytest.mark.sweep(of=8)
@pytest.mark.parametrize("look", USED.values(), ids=USED)
def test_a_number_that_something_depends_on_is_checked(look):
    with pytest.raises(CaptureError, match="depends on the model's weights"):
        logged(look, real=None)
    if look is not before:  # whose graph is another one at each call
        assert [read.checked for read in logged(look).reads] == [True]


def test_float_is_used_whatever_becomes_of_it():
    """Python gives nobody else a word in it; the error says how to read a number for a log."""
    found = logged(lambda m, h: setattr(m, "last", float(h.norm())))
    (module,) = lowered(found, Logger(None), [], rows=2)
    with pytest.raises(ModelError) as error:
        module.module(torch.zeros(2, 3))
    assert str(error.value).endswith("(torch.where); a number for a log is read by .item()")


class Heads(nn.Module):
    """A task has a layer of its own, which is found by a text."""

    def __init__(self, key):
        super().__init__()
        self.key = key
        self.heads = nn.ModuleDict({f"task {k}": nn.Linear(3, 3) for k in range(2)})

    def forward(self, x, task):
        return self.heads[self.key(task[0])](x).sum()


@pytest.mark.parametrize(
    "key", [lambda task: "task " + str(task.item()), lambda task: f"task {task}"]
)
def test_a_number_whose_text_chooses_a_layer_is_checked(key):
    """Bug: a text was taken for a log, and every task trained the head of the first."""
    model = Heads(key)

    def inputs(rows, of=1):
        return ones(rows) | {"task": torch.full((rows,), of)}

    found = trace_model(model, inputs)
    assert [(read.value, read.checked) for read in found.reads] == [(1, True)]
    (only,) = lowered(found, model, (), 2)
    other = inputs(2, of=0)
    with pytest.raises(ModelError, match="Python read 1 from a tensor here.* and reads 0 in this"):
        only.module(*(other[path] for path in only.stage.inputs))


class Scaled(nn.Module):
    """The scale follows from a text."""

    def __init__(self, scale):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), scale

    def forward(self, x, task):
        return self.layer(x).sum() * (2 if self.scale(task[0]) else 1)


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(
    "scale",
    [
        lambda task: len(str(task.item())) > 3,
        lambda task: int(f"{task}") > 30,
        lambda task: f"{task.item():+d}".startswith("-"),
    ],
)
def test_so_is_one_whose_text_is_measured_or_compared(scale):
    """Bug: a next number gave the same text but for its last digit."""
    found = trace_model(Scaled(scale), lambda rows: ones(rows) | {"task": torch.ones(rows).long()})
    assert [(read.value, read.checked) for read in found.reads] == [(1, True)]


class SlicesAndLogs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        hidden = self.layer(x)
        wide = (x[0] > 0).sum().item()
        self.last = hidden.norm().item()
        return hidden[:, :wide].mean()


def test_a_number_that_is_used_leaves_a_log_beside_it_unchecked():
    """Bug: two runs that show other numbers were told apart by the one that torch was given."""
    found = trace_model(SlicesAndLogs(), ones)
    assert [read.checked for read in found.reads] == [True, False]
