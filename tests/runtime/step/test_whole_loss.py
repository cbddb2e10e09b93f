"""A loss of the whole batch, in two passes over one process's micro-batches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe
from autopipe.runtime.step.whole_loss import buffers_restored
from tests.support.inprocess import machine
from tests.support.pipes import close, close_gradients
from tests.support.staged import trace_model


class Scaled(nn.Module):
    """Scales its input in place, as models do that normalize a picture without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x.mul_(2)).relu())
        return out


def near(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Each row is to be nearest to its own label."""
    near = F.normalize(outputs) @ F.normalize(batch["label"]).T
    return F.cross_entropy(near, torch.arange(len(outputs)))


def near_the_input(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """To its own input, of which the model has left twice the numbers."""
    return F.cross_entropy(outputs @ batch["x"].T, torch.arange(len(outputs)))


def inputs(rows: int) -> dict[str, Tensor]:
    x = torch.arange(4.0 * rows).reshape(rows, 4).sin()
    return {"x": x, "label": x.flip(1).cos()}


def test_both_passes_read_the_batch_as_it_was_given() -> None:
    """Bug: the second pass, which makes the gradients, began with what the first had written. The
    batch ends as in plain PyTorch, where forward writes it once."""
    for loss in (near, near_the_input):
        torch.manual_seed(0)
        model = Scaled()
        plan = autopipe.plan(
            model, inputs, loss=loss, cluster=machine(1), batch_size=8, micro_batches=2,
            loss_over="batch",
        )  # fmt: skip
        pipe = autopipe.parallelize(copy.deepcopy(model), plan, loss=loss)
        ours, theirs = inputs(8), inputs(8)
        expected = loss(model(theirs["x"]), theirs)
        expected.backward()
        close(pipe.step(ours), expected)
        close_gradients(pipe, model)
        assert torch.equal(ours["x"], theirs["x"])


class Counted(Scaled):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


def test_an_evaluation_that_is_refused_leaves_buffers_as_they_were() -> None:
    """Bug: a batch that takes the other side of a branch is refused where the branch stands, and
    what forward had written before stayed."""
    model = Counted()
    graph = trace_model(model, inputs, near).graph
    with pytest.raises(ValueError), buffers_restored(graph, dict(model.named_buffers())):
        model(inputs(2)["x"])
        raise ValueError("refused")
    assert model.calls == 0
