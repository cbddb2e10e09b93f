"""Outputs of an evaluation are put together from those of micro-batches as the model gives them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopipe
from autopipe import Pipe
from tests.support.inprocess import machine

ROWS, PARTS = 8, 2


class Several(nn.Module):
    """Returns values whose rows lie in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a = self.first(x)
        b = self.second(a.relu())
        return {
            "rows": b,
            "columns": b.T,
            "both": torch.cat([a, b]),  # as contrastive models return two views of each row
            "entries": torch.stack([a, b], 1).flatten(0, 1),
            "bias": self.first.bias * 1,
            "pairs": b @ b.T,
        }


def inputs(rows: int) -> dict[str, Tensor]:
    return {"x": torch.arange(4.0 * rows).reshape(rows, 4).sin()}


def loss(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return outputs["rows"].square().mean()


def test_rows_are_in_the_order_in_which_the_model_gives_them() -> None:
    """Bug: of `cat([a, b])` came a and b of micro-batch 0, then a and b of micro-batch 1.

    What has no dim of rows has one of micro-batches, and so have values of pairs: no micro-batch
    has those of a row with another micro-batch's.
    """
    torch.manual_seed(0)
    model = Several()
    plan = autopipe.plan(
        model, inputs, loss=loss, cluster=machine(1), batch_size=ROWS, micro_batches=PARTS
    )
    pipe: Pipe = autopipe.parallelize(model, plan, loss=loss)
    batch = inputs(ROWS)
    _, found = pipe.evaluate(batch, outputs=True)
    with torch.no_grad():
        whole = model(batch["x"])
        parts = [model(x) for x in batch["x"].chunk(PARTS)]
    assert [*found] == [*whole]
    for name in ("rows", "columns", "both", "entries"):
        assert torch.equal(found[name], whole[name]), name
    for name in ("bias", "pairs"):
        assert torch.equal(found[name], torch.stack([part[name] for part in parts])), name
