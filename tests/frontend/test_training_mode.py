"""Which parts of a model are in training, and that a step is the step of a training loop."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.frontend.training_mode import put_into
from tests.support.staged import Step, differences, staged_step, trace_model


class Backbone(nn.Module):
    """As detectors have it: its norms are fine-tuned nowhere, and `train` leaves them as they are.

    It is built in training: only a loop's `net.train()` freezes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.norm.running_mean = torch.linspace(-1.0, 1.0, 8)

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.up(x)).relu()
        return found


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.norm, self.head = Backbone(), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.dropout = nn.Dropout(0.5).eval()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.dropout(self.norm(self.backbone(x))))
        return found


def in_evaluation(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if not module.training]


def test_a_train_of_its_own_is_called_and_what_is_in_evaluation_stays_there() -> None:
    model = Detector()
    assert in_evaluation(model) == ["dropout"]
    for _ in range(2):
        assert in_evaluation(put_into(model, training=True)) == ["backbone.norm", "dropout"]
    put_into(model, training=False)
    assert len(in_evaluation(model)) == len([*model.modules()])
    put_into(model, training=True)
    assert in_evaluation(model) == ["backbone.norm"], "as after .eval() and .train()"


def test_one_that_an_object_has_is_called_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.train = lambda mode=True: model[1].train(False)  # type: ignore[method-assign]
    assert in_evaluation(put_into(model, training=True)) == ["1"]


def inputs(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 6), "y": torch.randn(rows, 2)}


def loss(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch["y"]).square().mean()


def test_a_step_leaves_the_norms_of_a_frozen_backbone_as_they_are() -> None:
    """Bug: they took the statistics of each micro-batch, and moved: no training loop does that."""
    model, batch = Detector(), inputs(6)
    found = staged_step(model, trace_model(model, inputs, loss), batch, ["backbone/relu/0"], 2)
    net = copy.deepcopy(model).train()
    net.dropout.eval()
    halves = zip(batch["x"].chunk(2), batch["y"].chunk(2), strict=True)
    losses = [loss(net(x), {"y": y}) for x, y in halves]
    torch.stack(losses).mean().backward()
    assert differences(found, Step.of(losses, net), tolerance=1e-6) == []
    assert torch.equal(found.buffers["backbone.norm.running_mean"], torch.linspace(-1.0, 1.0, 8))
