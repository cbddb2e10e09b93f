"""The unsplit model of a check: all micro-batches of all replicas, and what rounding does to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.checking.compare import off
from autopipe.checking.random_ops import RandomNodes
from autopipe.checking.unsplit import Unsplit
from autopipe.frontend.model_file import ModelFile
from autopipe.planners.driver import make_plan
from autopipe.rewriting.label_counts import label_counts
from autopipe.runtime.start import trace_planned
from tests.support.inprocess import machine
from tests.support.odd_models import Scaled


class Balanced(nn.Module):
    """Its loss is a mean over labels beside another term, as that of experts is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.up(x).relu()
        return self.down(hidden), hidden.mean()


def inputs(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 8), "labels": torch.arange(rows) % 4}


def loss(outputs: tuple[Tensor, Tensor], batch: dict[str, Any]) -> Tensor:
    logits, balance = outputs
    return nn.functional.cross_entropy(logits, batch["labels"]) + 0.01 * balance


def test_a_mean_over_labels_beside_another_term_in_two_replicas() -> None:
    """Bug: it looked for the labels of four replicas in the batch of two, and found an end."""
    file = ModelFile("net.py", Balanced, inputs, loss, None, None, None, None)
    plan = make_plan.plan(
        Balanced, inputs, loss=loss, cluster=machine(2), batch_size=8, dp=2, micro_batches=2
    )
    labels = label_counts(trace_planned(Balanced, None, loss, plan).trace.graph)
    assert labels is not None and labels.terms
    batch, unsplit = inputs(8), Unsplit(file, plan, RandomNodes, labels)
    found = unsplit.step(batch, 1.0)
    whole = loss(unsplit.model(batch["x"]), batch)
    torch.testing.assert_close(found.loss, whole.detach())


class Tied(nn.Module):
    """Both experts have the same score for every row: the first one gets them all."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.experts, self.shared = nn.Linear(8, 2), nn.Linear(8, 2), nn.Linear(8, 2)
        for parameter in self.scores.parameters():
            parameter.data[1] = parameter.data[0]
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        chosen = self.scores(x).argmax(1)[:, None]
        experts, shared = self.experts(x).gather(1, chosen), self.shared(x)
        return experts.square().mean() + shared.square().mean()


def rows_of(count: int) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 8)}


def test_nudged_parameters_show_what_rounding_decides() -> None:
    torch.manual_seed(0)
    file = ModelFile("tied.py", Tied, rows_of, None, None, None, None, None)
    plan = make_plan.plan(
        Tied, rows_of, cluster=machine(1), batch_size=16, micro_batches=2, precision="bf16"
    )
    batch, unsplit = rows_of(16), Unsplit(file, plan, RandomNodes, None)
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


class Centred(nn.Module):
    """It keeps the mean of what it has seen in a plain attribute, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4)
        self.mean = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.up(x)
        away = found - self.mean
        with torch.no_grad():
            self.mean.lerp_(found.mean(0), 0.5)
        return away


def test_replicas_and_references_have_their_own_tensors_that_are_no_buffers() -> None:
    """Bug: a right plan for two replicas differed, for the second one went on from the first."""
    scaled = Scaled()
    file = ModelFile("net.py", Centred, rows_of, scaled, None, None, None, None)
    plan = make_plan.plan(
        Centred,
        rows_of,
        loss=scaled,
        loss_over="micro-batch",
        cluster=machine(2),
        batch_size=8,
        dp=2,
        micro_batches=2,
    )
    batch = {"x": torch.randn(4, 8).repeat(2, 1)}  # both replicas have the same rows
    unsplit, wide = (Unsplit(file, plan, RandomNodes, None) for _ in range(2))
    found = [unsplit.step(batch, 1.0), wide.step(batch, 1.0)]
    model, alone, total = unsplit.model, Scaled(), torch.zeros(())
    model.mean = torch.zeros(4)
    for rows in (batch["x"][:2], batch["x"][2:4]):
        total += alone(model(rows), {}).detach() / 2
    assert [float(step.loss) for step in found] == [float(total)] * 2


class CentredLoss(nn.Module):
    """DINO's kind: its buffers follow the outputs, one by assignment, one in place."""

    centre: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, outputs: Tensor, batch: Any) -> Tensor:
        found = (self.scale.clone() * (outputs - self.centre)).square().mean()
        self.centre = 0.5 * self.centre + 0.5 * outputs.detach().mean(0)
        with torch.no_grad():
            self.scale.lerp_(outputs.square().mean(), 0.5)
        return found


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.up(x)


def test_each_replica_has_its_own_buffers_of_the_loss() -> None:
    """Bug: a right plan of a loss with a centre differed at --dp 2: the second replica went on
    from the buffers that the first one had left."""
    loss, count = CentredLoss(), 2
    file = ModelFile("net.py", Up, rows_of, loss, None, None, None, None)
    plan = make_plan.plan(
        Up,
        rows_of,
        loss=loss,
        loss_over="micro-batch",
        cluster=machine(2),
        batch_size=8,
        dp=2,
        micro_batches=count,
    )
    steps = [rows_of(8) for _ in range(2)]
    unsplit = Unsplit(file, plan, RandomNodes, None)
    found = [float(unsplit.step(batch, 1.0).loss) for batch in steps]
    replicas = [CentredLoss(), CentredLoss()]
    for batch, step in zip(steps, found, strict=True):
        of_replicas = batch["x"].chunk(2)
        losses = [
            float(alone(unsplit.model(rows), {}).detach()) / 4
            for alone, own in zip(replicas, of_replicas, strict=True)
            for rows in own.chunk(count)
        ]
        assert step == pytest.approx(sum(losses), rel=1e-6)


class Half(nn.Module):
    """It centres by the mean of all that it and the other half have seen."""

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.up(x)
        self.mean.lerp_(found.detach().mean(0), 0.5)
        return found - self.mean


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mean = torch.zeros(8)
        self.one, self.other = Half(mean), Half(mean)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.other(self.one(x).tanh())
        return found.square().mean()


def test_a_buffer_of_two_modules_stays_one() -> None:
    """Bug: a right plan differed, for from the first micro-batch on the model had two of them."""
    file = ModelFile("net.py", Halves, rows_of, None, None, None, None, None)
    plan = make_plan.plan(
        Halves,
        rows_of,
        loss_over="micro-batch",
        cluster=machine(1),
        batch_size=8,
        micro_batches=2,
    )
    batch, unsplit = rows_of(8), Unsplit(file, plan, RandomNodes, None)
    mean = unsplit.step(batch, 1.0).buffers[0]["one.mean"]
    model = unsplit.model
    assert model.get_buffer("one.mean") is model.get_buffer("other.mean")
    torch.manual_seed(0)
    alone = Halves()
    for part in batch["x"].split(4):
        alone(part)
    torch.testing.assert_close(mean, alone.one.mean)


class FrozenNorm(nn.Module):
    """Its batch norm was put into evaluation, as in the fine-tuning of a detector's backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)
        nn.init.constant_(self.norm.running_mean, 0.5)  # type: ignore[arg-type]  # not None
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.up(x))
        return found.square().mean()


def test_a_part_that_a_model_in_training_has_in_evaluation_stays_there() -> None:
    """Bug: planning refused a frozen batch norm, for it had put the whole model into training
    before it compared the model with its graph; and `check` did the same."""
    file = ModelFile("net.py", FrozenNorm, rows_of, None, None, None, None, None)
    plan = make_plan.plan(
        FrozenNorm, rows_of, cluster=machine(1), batch_size=8, dp=1, micro_batches=2
    )
    batch, unsplit = rows_of(8), Unsplit(file, plan, RandomNodes, None)
    found = unsplit.step(batch, 1.0)
    torch.testing.assert_close(found.loss, unsplit.model(batch["x"]).detach())
    assert torch.equal(found.buffers[0]["norm.running_mean"], torch.full((4,), 0.5))
