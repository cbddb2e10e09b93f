"""What forward and the loss write is in a checkpoint, whatever keeps it.

parameter   a frozen one, a teacher's that follows the student's
buffer      running statistics; and one that is not persistent, which no state dict has
beside      a tensor in a plain attribute of the model, or of the loss
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import autopipe
from autopipe import Pipe
from autopipe.runtime.checkpoint.content import rank_file
from autopipe.runtime.checkpoint.convert import to_file
from autopipe.runtime.checkpoint.stored import Stored
from tests.support.inprocess import machine
from tests.support.odd_models import Scaled


class Student(nn.Module):
    """It has one tensor of each kind that forward writes; `up.weight` is one that it projects."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 4)
        self.teacher = nn.Linear(8, 4).requires_grad_(False)
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.mean = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9)
            self.up.weight.clamp_(-0.3, 0.3)
        found, wanted = self.up(x), self.teacher(x).detach()
        away = (found - wanted - self.mean) * self.scale.clone()
        with torch.no_grad():
            self.mean.lerp_(found.mean(0), 0.1)
            for own, followed in zip(self.teacher.parameters(), self.up.parameters(), strict=True):
                own.lerp_(followed, 0.1)
        return away


def drawn(rows: int, seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))}


def begun() -> tuple[Pipe, torch.optim.Optimizer]:
    """A run at its beginning, of a process that has not seen another one."""
    loss, words = Scaled(), {"loss_over": "micro-batch", "batch_size": 4, "micro_batches": 2}
    plan = autopipe.plan(Student, drawn, loss=loss, cluster=machine(1), pp=1, **words)
    pipe = autopipe.parallelize(Student, plan, loss=loss, inputs=drawn)
    return pipe, torch.optim.SGD(pipe.parameters(), lr=0.1)


def trained(pipe: Pipe, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for number in steps:
        losses.append(float(pipe.step(drawn(4, number))))
        optimizer.step()
    return losses


def test_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Bug: what no state dict has was as before the first step, without a word."""
    pipe, optimizer = begun()
    trained(pipe, optimizer, range(2))
    pipe.save(tmp_path / "ck", optimizer)
    expected = trained(pipe, optimizer, range(2, 4))

    again, other = begun()
    assert again.load(tmp_path / "ck", other) == 2
    assert trained(again, other, range(2, 4)) == expected


def test_no_state_dict_and_no_file_of_the_model_has_more_than_before(tmp_path: Path) -> None:
    pipe, optimizer = begun()
    pipe.save(tmp_path / "ck", optimizer)
    (folder,) = (tmp_path / "ck").iterdir()
    to_file(Stored.open(folder), tmp_path / "model.safetensors")
    model = [*Student().state_dict()]
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(model)
    assert sorted(pipe.state_dict()) == sorted(model)
    chunks = json.loads((folder / "rank-0.json").read_text())["chunks"]["chunks"]
    beside = {chunk["name"].rpartition(".")[2] for chunk in chunks if chunk["kind"] == "beside"}
    assert {"scale", "mean"} < beside
    assert len(beside) == 3  # the loss's has no name in the model


def test_forward_changes_nothing_that_is_being_written() -> None:
    """Bug: the thread that writes read a teacher's parameters while the next step changed them, and
    those that a step projects before the optimizer's own."""
    pipe, optimizer = begun()
    made = rank_file(pipe.content(optimizer), 0, 0, 1, {})
    before = {written.key: written.tensor.clone() for written in made.tensors}
    pipe.step(drawn(4))
    assert "teacher.weight" in before
    assert [w.key for w in made.tensors if not torch.equal(w.tensor, before[w.key])] == []
