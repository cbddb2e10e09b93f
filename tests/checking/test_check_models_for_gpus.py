"""`autopipe check` on a CPU, of models and plans that are meant for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.shell import Shell

ON_A_GPU = """
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


@pytest.mark.long
def test_a_file_that_is_all_on_a_gpu_is_planned_for_two_and_checked_here(
    autopipe: Shell, tmp_path: Path
) -> None:
    """Bug: on a GPU its model could not be traced, and `check` compared tensors of two devices."""
    (tmp_path / "model.py").write_text(ON_A_GPU)
    asked = ("--cluster", "2xA100-40GB", "--pp", "2", "--precision", "fp32", "--no-compile")
    said = autopipe("plan", "model.py", *asked, "--batch", "8", "-o", "plan.json")
    assert said.code == 0, said.err
    said = autopipe("check", "plan.json")
    assert said.code == 0 and "the same: " in said.out, said.err
    assert torch.get_default_device().type == "cpu"


def test_compiled_graphs_of_gpus_run_as_they_are(autopipe: Shell, tmp_path: Path) -> None:
    """Bug: what torch writes in C++ for an LSTM under autocast does not compile, and who has no
    compiler could check no plan for GPUs."""
    (tmp_path / "model.py").write_text(ON_A_GPU)
    asked = ("--cluster", "2xA100-40GB", "--pp", "2", "--compile", "--schedule", "1f1b")
    said = autopipe("check", "model.py", *asked, "--batch", "8")
    assert said.code == 0 and "the same: " in said.out, said.err
    assert "compiled; 8 rows" in said.out
    assert "the graphs that a GPU's compiler would be given run here as they are" in said.out
