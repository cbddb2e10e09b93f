"""A run of replicas that is stopped and goes on: each has what its own forward has written."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import autopipe
from autopipe.frontend import model_file
from autopipe.runtime.checkpoint.compare import differences
from autopipe.runtime.checkpoint.layout import REPLICA
from autopipe.runtime.checkpoint.stored import Stored
from autopipe.runtime.checkpoint.whole import tensors
from tests.support.inprocess import machine
from tests.support.shell import ranks

MODEL = """
import torch
from torch import nn


class Centred(nn.Module):
    '''Training reads the centre of the rows that it has seen, as observers of quantisation do.'''

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("centre", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            self.centre.lerp_(x.mean(0), 0.3)
            self.calls.add_(x[0, 0])
        hidden = self.first(x - self.centre + self.calls).tanh()
        return self.second(hidden).square().mean()


def model():
    return Centred()


def inputs(batch_size):
    return {"x": torch.randn(batch_size, 6)}
"""


def planned(path: Path, dp: int) -> None:
    before = sys.path.copy()
    file = model_file.load("model.py")
    sys.path[:] = before
    autopipe.plan(
        file.model, file.inputs, cluster=machine(dp), batch_size=8, dp=dp, micro_batches=2,
        zero=dp - 1, source="model.py",
    ).save(path)  # fmt: skip


def losses(folder: Path, plan: str, dp: int, steps: int, *more: str) -> list[float]:
    said = ranks(
        dp, "-m", "autopipe", "run", plan, "--steps", str(steps), "--metrics", "steps.jsonl",
        "--quiet", *more, folder=folder,
    )  # fmt: skip
    assert said.code == 0, said.err
    found = [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    (folder / "steps.jsonl").unlink()
    return found


def test_each_replica_goes_on_from_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a checkpoint had the first replica's alone, and the others went on from these.

    Under a plan of other replicas all of them still do, as nobody's are theirs.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    planned(tmp_path / "two.json", 2)
    planned(tmp_path / "one.json", 1)
    every_second = ("--checkpoints", "never", "--save-every", "2")
    unbroken = losses(tmp_path, "two.json", 2, 4, *every_second)
    for name in ("kept", "other"):  # as of a run that was stopped after its second step
        shutil.copytree("never/step-00000002", f"{name}/step-00000002")
    rest = losses(tmp_path, "two.json", 2, 4, "--checkpoints", "kept", "--resume")
    assert rest == unbroken[2:]
    alone = losses(tmp_path, "one.json", 1, 4, "--checkpoints", "other", "--resume")
    assert alone != rest and alone == pytest.approx(rest, rel=0.2)

    at_four = [Stored.open(tmp_path / name / "step-00000004") for name in ("never", "kept")]
    assert list(differences(*at_four)) == []
    every = {tensor.key: tensor.kind for tensor in tensors(at_four[0])}
    replicas = {key for key, kind in every.items() if kind == REPLICA}
    assert replicas == {"centre/replica 1 of 2", "calls/replica 1 of 2"}
    one = Stored.open(tmp_path / "other" / "step-00000004")
    assert not any("replica" in sentence for sentence in differences(at_four[0], one))
