"""Models that put their tensors on a GPU by its name: traced and checked where there may be none.

A rank puts them on its own device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe.checking import check
from tests.support import warm
from tests.support.odd_models import MICRO_BATCHES, ROWS, Net, built, eager, inputs, square
from tests.support.shell import Shell
from tests.support.staged import differences, staged_step, trace_model


class Named(Net):
    """Makes tensors on the GPU, and moves others there."""

    device = "cuda"

    def inside(self, hidden):
        at = torch.arange(8, device=self.device) * 0.1
        kept = torch.ones(8).to(f"{self.device}:0") + torch.zeros(8).to(torch.device(self.device))
        kept = kept.cuda() if self.device == "cuda" else kept
        return self.middle(hidden + at) * kept.to(torch.device(self.device, 0), torch.float32)


class Within(Net):
    """Makes tensors under a default device, and reads entries by several indices."""

    device = "cuda"

    def inside(self, hidden):
        with torch.device(self.device):
            hidden = hidden * torch.linspace(0, 1, hidden.shape[-1])
        rows = torch.arange(hidden.shape[0])
        return self.middle(hidden) + hidden[rows, rows * 0][:, None]


class AsItIs(Net):
    """Sorts with numpy, which no graph can: a region, whose own code runs."""

    device = "cuda"

    def inside(self, hidden):
        order = torch.from_numpy(hidden.detach().cpu().numpy().argsort(1)).to(self.device)
        return self.middle(hidden).gather(1, order)


@pytest.mark.parametrize("kind", [Named, Within, AsItIs])
def test_a_forward_that_names_a_gpu_is_traced_on_a_cpu(kind):
    """Bug: planning for GPUs on a host without one ended in "Torch not compiled with CUDA"."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trace = trace_model(built(kind), inputs, square)
        batch = inputs(ROWS * MICRO_BATCHES)
        found = staged_step(built(kind), trace, batch, (), MICRO_BATCHES)
        expected = eager(built(type("OnCPU", (kind,), {"device": "cpu"})))
    assert differences(found, expected, tolerance=1e-5) == []


MODEL = """
import torch
from torch import nn

device = torch.device("cuda")
torch.set_default_device(device)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.table = torch.linspace(0, 1, 8)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x + self.table))
        return x


def model():
    return Net().to(device)


def inputs(rows):
    return {"x": torch.randn(rows, 8).cuda(), "y": torch.randn(rows, 8, device=device)}


def loss(outputs, batch):
    return nn.functional.mse_loss(outputs, batch["y"])
"""


@pytest.fixture
def autopipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    def start(ranks: int, argv: Sequence[str]) -> int:
        return warm.spawn(ranks, ["-m", "autopipe", *argv], tmp_path)

    monkeypatch.setattr(check, "spawn", start)
    return Shell(tmp_path, monkeypatch, capsys)


def test_a_file_that_is_all_on_a_gpu_is_planned_for_two_and_checked_here(
    autopipe: Any, tmp_path: Path
) -> None:
    """Bug: on a GPU its model could not be traced, and `check` compared tensors of two devices."""
    (tmp_path / "model.py").write_text(MODEL)
    asked = ("--cluster", "2xA100-40GB", "--pp", "2", "--precision", "fp32", "--no-compile")
    said = autopipe("plan", "model.py", *asked, "--batch", "8", "-o", "plan.json")
    assert said.code == 0, said.err
    said = autopipe("check", "plan.json")
    assert said.code == 0 and "the same: " in said.out, said.err
    assert torch.get_default_device().type == "cpu"
