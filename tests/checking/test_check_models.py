"""`autopipe check` of models that once made it, or a run, err: both sides are the same.

Each test says in its docstring which tensor was said to differ, or what a run did wrong.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.layers_file import LAYERS
from tests.support.shell import Shell, changed


@pytest.mark.long
def test_statistics_that_are_a_mean_over_all_batches(autopipe: Shell) -> None:
    """Bug: the last place of a running variance was said to differ; torch divides otherwise."""
    averaged = LAYERS.replace("(Layer() for _ in range(4)))", "(Layer(), Layer()), norm())")
    norm = "def norm():\n    return nn.BatchNorm1d(8, momentum=None)\n\n\nclass Layer"
    autopipe.write(
        "net.py", averaged.replace("class Layer", norm) + '\nloss_over = "micro-batch"\n'
    )
    said = autopipe("check", "net.py", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)["rows"]
    assert [row["tensors"] for row in found if row["what"] == "buffers"] == [3, 3]


OWN_CONTAINERS = """
from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

class Entries(UserDict):
    def __getattr__(self, name):
        return self.data[name] if name in self.data else super().__getattribute__(name)

class Answer(NamedTuple):
    target: Tensor
    scale: Tensor

    def off(self, result):
        return ((result - self.target) * self.scale[:, None]).square().mean()

@dataclass(frozen=True)
class Sample:
    entries: Entries
    answer: Answer

    def masked(self, rows):
        return rows * self.entries.mask[..., None]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, sample):
        assert isinstance(sample, Sample), "as plain PyTorch has it"
        rows = self.table(sample.entries.ids)
        for layer in self.layers:
            rows = sample.masked(torch.tanh(layer(rows)))
        return rows.mean(1)

model = Net

def inputs(rows):
    entries = Entries(ids=torch.randint(16, (rows, 8)), mask=torch.ones(rows, 8))
    return Sample(entries, Answer(torch.randn(rows, 8), torch.rand(rows)))

def loss(result, sample):
    return sample.answer.off(result)
"""


def test_a_batch_in_classes_of_the_file(autopipe: Shell) -> None:
    """Bug: ranks traced with plain containers, which have none of the classes' methods."""
    autopipe.write("net.py", OWN_CONTAINERS)
    said = autopipe("check", "net.py", "--pp", "2")
    assert said.code == 0, said.err


CHOSEN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def mixed(self, hidden, chosen):
        made = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                made = made.index_add(0, rows, expert(hidden[rows]))
        return made

    def forward(self, x):
        hidden = self.up(x).tanh()
        return self.down(hidden + self.mixed(hidden, (x[:, 0] > 0).long())).square().mean()

model = Net

def inputs(rows):
    sign = 1 if torch.rand(()) < 0.5 else -1
    x = torch.randn(rows, 8)
    x[:, 0] = x[:, 0].abs() * sign
    return (x,)

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)
"""


@pytest.mark.parametrize("zero", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
def test_experts_that_no_row_of_a_step_has_chosen(autopipe: Shell, zero: int) -> None:
    """Bug: with replicas a run ended where one got its first rows in a later step; one that got
    none had a gradient of zeros, for which AdamW changes a weight and torch would pass over it."""
    (autopipe.folder / "chosen.py").write_text(CHOSEN)
    asked = ("--pp", "1", "--dp", "2", *(("--zero", str(zero)) if zero else ()))
    said = autopipe("check", "chosen.py", *asked, "--json")
    assert said.code == 0, said.err
    found = [row for row in json.loads(said.out)["rows"] if row["what"] == "gradients"]
    assert all(row["off"] < 1e-6 for row in found)


def test_an_optimizer_that_goes_by_places_is_refused(autopipe: Shell) -> None:
    """Bug: in a run each rank gave its own first parameter what is for that of the model."""
    by_places = "def optimizer(parameters):\n    first, *rest = parameters\n"
    by_places += "    return torch.optim.SGD([{'params': first, 'lr': 0.1}, {'params': rest}])\n"
    autopipe.write("net.py", f"{LAYERS}\n\n{by_places}")
    said = autopipe("check", "net.py")
    assert said.code == 2
    assert "the split model does not run (exit code 2)" in " ".join(said.out.split())


SCALED = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (self.layer(x) * self.scale.exp()).square().mean()

model = Scaled

def inputs(rows):
    return {"x": torch.ones(rows, 8)}
"""


@pytest.mark.long
def test_a_scalar_is_a_row_of_one_replica(autopipe: Shell) -> None:
    """Bug: the temperature of a contrastive loss was compared as if all replicas had it whole."""
    (autopipe.folder / "scaled.py").write_text(SCALED)
    asked = ("--cluster", "local:2", "--dp", "2", "--zero", "2", "--batch", "8")
    assert autopipe("plan", "scaled.py", *asked).code == 0
    said = autopipe("check", "plan.json")
    assert (said.code, "the same: " in said.out) == (0, True), said.err


TEACHER = """\
import torch
from torch import nn


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mine, followed in zip(self.teacher.parameters(), self.student.parameters()):
                mine.mul_(0.9).add_(followed, alpha=0.1)
        x = self.frozen(x).relu()
        return (self.student(x) - self.teacher(x)).square().mean()


model = Distilled


def inputs(batch_size):
    return {"x": torch.randn(batch_size, 8)}
"""


@pytest.mark.long
def test_what_is_not_trained_is_whole_and_each_replica_s_own(autopipe: Shell) -> None:
    """Bugs: frozen parameters were said to differ under ZeRO-1 and 2, and a teacher, which the
    unsplit model had moved once for each replica."""
    (autopipe.folder / "distilled.py").write_text(TEACHER)
    said = autopipe("check", "distilled.py", "--pp", "1", "--dp", "2", "--zero", "1")
    assert (said.code, "the same: " in said.out) == (0, True), said.out


def test_what_forward_moves_is_not_gathered(autopipe: Shell) -> None:
    """Bug: under ZeRO-3 a run lost what moves a teacher: it was written to what was gathered."""
    (autopipe.folder / "distilled.py").write_text(TEACHER)
    refused = autopipe("check", "distilled.py", "--pp", "1", "--dp", "2", "--zero", "3")
    assert refused.code == 2
    assert "distilled.py:14: forward writes the parameter 'teacher.weight'" in refused.error


SPARSE = """\
import torch
from torch import nn


def model():
    words = nn.Embedding(3, 8, sparse=True)
    return nn.Sequential(words, nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 2))


def inputs(batch_size):
    return {"input": torch.arange(6 * batch_size).view(batch_size, 6) % 3}


def loss(outputs, batch):
    return outputs.square().mean()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.mark.long
def test_sparse_gradients_are_sums_in_an_order_of_their_own(autopipe: Shell) -> None:
    """Bug: dense ones differ from them in the last place, which was a difference."""
    (autopipe.folder / "words.py").write_text(SPARSE)
    said = autopipe("check", "words.py")
    assert said.code == 0, said.err
    assert "the same: " in said.out


CENTRED = """
import torch
from torch import nn

class Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, outputs, batch):
        with torch.no_grad():
            found = (outputs - self.mean).square().mean()
            self.mean.lerp_(outputs.mean(0), 0.5)
        return (outputs - self.mean).square().mean() + found

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

def inputs(rows):
    return {"input": torch.randn(rows, 8)}

loss_over = "micro-batch"
loss = Centre()
"""


@pytest.mark.long
def test_a_loss_that_keeps_a_mean_begins_each_run_with_the_same(autopipe: Shell) -> None:
    """Bug: a look at random numbers before tensor-parallel ranks start had moved it."""
    (autopipe.folder / "centred.py").write_text(CENTRED)
    said = autopipe("check", "centred.py", "--tp", "2")
    assert said.code == 0, said.out


@pytest.mark.long
def test_norms_that_are_set_in_each_micro_batch_are_set_once(autopipe: Shell) -> None:
    """Bug: EEGNet's were told to differ, by the last bit that setting them again changes."""
    norms = "self.up.weight.data = torch.renorm(self.up.weight.data, 2, 0, 0.3)\n        "
    autopipe.write("net.py", changed("y = self.up(x)", f"{norms}y = self.up(x)"))
    said = autopipe("check", "net.py", "--batch", "8", "--micro-batches", "4")
    assert said.code == 0, said.out
    assert "forward sets norms of a parameter" in " ".join(said.out.split())


DROPS_LAYERS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x):
        hidden = self.up(x)
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                continue
            hidden = hidden + nn.functional.dropout(layer(hidden).tanh(), 0.1)
        return nn.functional.dropout(self.down(hidden), 0.1)

class TakesTurns(Net):
    # The last of its draws decides nothing.

    def forward(self, x):
        hidden = self.up(x)
        for layer in self.layers:
            out = layer(hidden)
            hidden = out if torch.rand(1).item() < 0.5 else hidden.flip(0)
        return self.down(out)

def model():
    return Net()

def inputs(rows):
    return {"x": torch.arange(8.0 * rows).reshape(rows, 8).sin()}

def loss(outputs, batch):
    return (outputs - batch["x"]).square().mean()
"""


@pytest.mark.parametrize("kind", ("Net", "TakesTurns"))
@pytest.mark.long
def test_layers_that_random_numbers_leave_out(autopipe: Shell, tmp_path: Path, kind: str) -> None:
    """Bug: a part that runs as it is was to draw once; one that draws for each layer, and more in
    those that it runs, could not be checked."""
    (tmp_path / "model.py").write_text(DROPS_LAYERS.replace("return Net()", f"return {kind}()"))
    said = autopipe("check", "model.py", "--pp", "2", "--micro-batches", "2", "--batch", "8")
    assert said.code == 0 and "the same: " in said.out, said.err
    assert "dropout is off" not in said.out + said.err


QUEUE = """
import torch
from torch import nn

class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("kept", torch.zeros(8, 8))

    def forward(self, x):
        y = self.down(self.up(x).relu())
        self.kept[torch.arange(len(x))] = y.detach()
        return y.square().mean()

def model():
    return Queue()

def inputs(rows):
    return {"x": torch.randn(rows, 8)}

loss_over = "micro-batch"
"""


@pytest.mark.long
def test_a_model_that_fails_by_itself_is_told_with_its_line(autopipe: Shell) -> None:
    """Bug: under tensor parallelism torch's words came without the line: under autocast the rows
    are of bf16, and the queue is of fp32."""
    autopipe.write("queued.py", QUEUE)
    said = autopipe("check", "queued.py", "--tp", "2", "--precision", "bf16-autocast")
    assert said.code == 2
    assert "queued.py:13 `self.kept[torch.arange(len(x))] = y.detach()`" in said.err
    assert "hint: cast what" in said.err
