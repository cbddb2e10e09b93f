"""The unsplit model of a check: what rounding of its parameters does to its gradients."""

from pathlib import Path

import torch

from autopipe.checking.compare import off
from autopipe.checking.unsplit import Unsplit
from autopipe.frontend import model_file
from autopipe.planners.driver import make_plan
from tests.support.inprocess import machine

TIED = """\
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores, self.experts, self.shared = nn.Linear(8, 2), nn.Linear(8, 2), nn.Linear(8, 2)
        for parameter in self.scores.parameters():
            parameter.data[1] = parameter.data[0]
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        chosen = self.scores(x).argmax(1)[:, None]
        experts, shared = self.experts(x).gather(1, chosen), self.shared(x)
        return experts.square().mean() + shared.square().mean()

model = Tied

def inputs(rows):
    return {"x": torch.randn(rows, 8)}
"""
"""Both experts have the same score for every row: the first one gets them all."""


def test_nudged_parameters_show_what_rounding_decides(tmp_path: Path) -> None:
    (tmp_path / "tied.py").write_text(TIED)
    file = model_file.load(str(tmp_path / "tied.py"))
    words = {"batch_size": 16, "micro_batches": 2, "precision": "bf16"}
    plan = make_plan.plan(file.model, file.inputs, cluster=machine(1), **words)
    unsplit = Unsplit(file, plan, list, None)
    torch.manual_seed(0)
    batch = file.inputs(16)
    expected = unsplit.step(batch, 1.0)
    before = {name: tensor.clone() for name, tensor in unsplit.model.state_dict().items()}
    nudged = unsplit.nudged(batch, 1.0, seed=0)
    experts, shared = "experts.weight", "shared.weight"
    assert not expected.gradients[experts][1].any()
    assert off(nudged[experts], expected.gradients[experts]) > 0.2
    assert 0 < off(nudged[shared], expected.gradients[shared]) < 0.1
    assert all(torch.equal(before[n], t) for n, t in unsplit.model.state_dict().items())
    again = unsplit.step(batch, 1.0)
    assert all(torch.equal(expected.gradients[n], g) for n, g in again.gradients.items())
    assert [float(own["calls"]) for own in again.buffers] == [4.0]  # two steps of two micro-batches
