"""What every rank gets of a step: the loss, and in an evaluation the outputs as the model gives
them, put together from those of micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopipe
from autopipe import Pipe
from autopipe.runtime.step.microbatches import EVEN
from autopipe.runtime.step.outputs import mean_loss
from tests.support.inprocess import machine

ROWS, PARTS = 8, 2


class Several(nn.Module):
    """Returns values whose rows lie in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.wider = nn.ConvTranspose1d(1, 2, 3)
        self.even = nn.InstanceNorm1d(1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a = self.first(x)
        b = self.second(a.relu())
        return {
            "rows": b,
            "columns": b.T,
            "both": torch.cat([a, b]),  # as contrastive models return two views of each row
            "entries": torch.stack([a, b], 1).flatten(0, 1),
            "words": F.log_softmax(torch.stack([a, b], 1).view(-1, 4), -1),  # of a language model
            "answers": torch.stack([a, b], 1).view(-1, 4).argmax(-1),
            "best": torch.stack([a, b], 1).view(-1, 4).topk(2)[0],
            "wider": self.wider(b.reshape(-1, 1, 2)),
            "even": self.even(b.reshape(-1, 1, 2)),
            "scaled": F.interpolate(b.reshape(-1, 1, 2), scale_factor=2.0, mode="linear"),
            "each twice": self.second(b.repeat_interleave(2, 0)),
            "all twice": self.second(b.repeat(2, 1)),
            "both twice": torch.cat([a, b]).repeat_interleave(2, 0),
            "both again": torch.cat([a, b]).repeat(2, 1),
            "side by side": torch.cat([torch.stack([a, b], 1).flatten(0, 1)] * 2, 1),
            "bias": self.first.bias * 1,
            "pairs": b @ b.T,
            "sorted": torch.cat([a, b]).sort(0)[0],
        }


STACKED = {"bias", "pairs", "sorted"}
"""What has a dim of micro-batches: no dim of rows, two, or one in an order that is not known."""


def inputs(rows: int) -> dict[str, Tensor]:
    return {"x": torch.arange(4.0 * rows).reshape(rows, 4).sin()}


def loss(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return outputs["rows"].square().mean() + outputs["wider"].square().mean()


def test_rows_are_in_the_order_in_which_the_model_gives_them() -> None:
    """Bug: of `cat([a, b])` came a and b of micro-batch 0, then a and b of micro-batch 1.

    What has no dim of rows has one of micro-batches, and so have values of pairs: no micro-batch
    has those of a row with another micro-batch's.

    Bug: of outputs behind a `log_softmax` or an `argmax` it was as of these.
    """
    found, whole, parts = evaluated(PARTS)
    assert [*found] == [*whole]
    for name in whole.keys() - STACKED:
        assert torch.allclose(found[name], whole[name], atol=1e-6), name
    for name in STACKED:
        assert torch.equal(found[name], torch.stack([part[name] for part in parts])), name


def test_of_a_single_micro_batch_each_order_is_the_models() -> None:
    """Bug: what is sorted had a dim of one micro-batch more than the model gives."""
    found, whole, _ = evaluated(1)
    for name in whole.keys() - {"bias", "pairs"}:
        assert torch.equal(found[name], whole[name]), name
    for name in ("bias", "pairs"):
        assert torch.equal(found[name], whole[name][None]), name


def evaluated(micro_batches: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
    """Outputs of an evaluation; of the model; of the model for each micro-batch."""
    torch.manual_seed(0)
    model = Several()
    plan = autopipe.plan(
        model, inputs, loss=loss, cluster=machine(1), batch_size=ROWS, micro_batches=micro_batches
    )
    pipe: Pipe = autopipe.parallelize(model, plan, loss=loss)
    batch = inputs(ROWS)
    _, found = pipe.evaluate(batch, outputs=True)
    with torch.no_grad():
        whole = model(batch["x"])
        return found, whole, [model(x) for x in batch["x"].chunk(micro_batches)]


def test_the_loss_is_the_same_number_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a loss of bf16 was rounded on ranks that have the last stage, and not on the others; a
    schedule that looks at it, as ReduceLROnPlateau, lowered the rate of one stage alone."""
    told: list[Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda sums, group: told.append(sums.clone()))
    losses = [{0: (torch.tensor(loss, dtype=torch.bfloat16),)} for loss in (1.0, 1.0078125)]
    of_ranks: list[Any] = [{}, losses[0], {}, losses[1]]  # two replicas of two stages
    world: Any = "all ranks"
    for results in of_ranks:
        mean_loss(results, EVEN, counted=False, tp=1, world=world)
    monkeypatch.setattr(dist, "all_reduce", lambda sums, group: sums.copy_(sum(told)))
    means = [mean_loss(results, EVEN, counted=False, tp=1, world=world) for results in of_ranks]
    assert [(mean.item(), mean.dtype) for mean, _ in means] == [(1.0, torch.bfloat16)] * 4
