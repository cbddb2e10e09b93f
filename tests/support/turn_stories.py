"""Stories of ranks that take turns at a stage: a step is still that of one process.

Sums of gradients over ranks have another order than one process has, so that they are close and
not equal to the bit; forwards are equal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopipe
from autopipe import Plan
from tests.support.inprocess import machine
from tests.support.long import sampled
from tests.support.memory_stories import measured_as_planned
from tests.support.pipes import (
    ZOO,
    close,
    piped,
    planned,
    story,
    together,
    without_inductor,
)
from tests.support.step_stories import files_run_as_planned


def in_turns(name: str, turns: tuple[int, ...], dp: int = 1, m: int = 5, **more: Any) -> Plan:
    """A plan whose ranks take turns; the usual five micro-batches divide by no number of ranks."""
    plan = planned(name, sum(turns), dp, m, turns=turns, **more)
    assert plan.turns == turns
    assert len(plan.boundaries) == len(turns) - 1
    return plan


@story(3)
def turns_at_a_stage() -> None:
    """At the last one and at the first; tied weights that stand at both ends, too."""
    cases: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
        ("gpt", (1, 2), {}),
        ("gpt", (2, 1), {"zero": 1}),
        ("llama", (1, 2), {"recompute": "all"}),
        ("counted", (1, 2), {}),
        ("llama", (3,), {"zero": 1}),
    ]
    for name, turns, more in sampled(cases, of=5):
        together(name, piped(name, in_turns(name, turns, **more)))


@story(3, long=True)
def turns_of_other_engines() -> None:
    """Compiled graphs, whose bytes and gradients are those of the plan; in 16 bits with masters."""
    with without_inductor():
        together("gpt", piped("gpt", in_turns("gpt", (1, 2), compile=True)))
    pipe = piped("gpt", in_turns("gpt", (1, 2), precision="bf16", zero=1))
    alone = piped("gpt", planned("gpt", 3, 1, 5, precision="bf16"))
    batch = ZOO["gpt"].inputs(10)
    close(pipe.step(batch), alone.step(batch), "loss in bf16", 1e-2)


@story(3, long=True)
def evaluation_in_turns() -> None:
    """Loss and outputs, in the order of the rows, of batches of any number of micro-batches."""
    plan, model = in_turns("gpt", (1, 2)), ZOO["gpt"].model().eval()
    pipe = piped("gpt", plan)
    for rows in (10, 3, 1):
        batch = ZOO["gpt"].inputs(rows)
        loss, outputs = pipe.evaluate(batch, outputs=True)
        with torch.no_grad():
            expected = ZOO["gpt"].eager(model, batch)
        assert isinstance(expected, torch.Tensor)
        close(loss, expected, f"loss of {rows} rows")
        assert outputs.shape[0] == rows
        alone = [piped_outputs(pipe, batch, row) for row in range(rows)]
        close(outputs, torch.cat(alone), f"outputs of {rows} rows")


def piped_outputs(pipe: Any, batch: Any, row: int) -> torch.Tensor:
    """The outputs of one row alone."""
    one = {name: tensor[row : row + 1] for name, tensor in batch.items()}
    return pipe.evaluate(one, outputs=True)[1]  # type: ignore[no-any-return]


@story(3)
def memory_in_turns() -> None:
    """To the byte as planned, on each of the ranks."""
    for precision, more in sampled((("fp32", {}), ("bf16", {"zero": 1})), of=2):
        measured_as_planned("gpt", 5, "1f1b", precision, pp=3, turns=(1, 2), **more)


@story(3)
def files_of_turns() -> None:
    """What `autopipe emit` writes of such a plan runs as the plan does."""
    files_run_as_planned("gpt", in_turns("gpt", (1, 2)))


@story(4, long=True)
def turns_in_the_middle() -> None:
    """Skips over a stage that two ranks have, and a stage after one of three."""
    for turns in sampled(((1, 2, 1), (1, 3), (2, 2)), of=2):
        together("skipping", piped("skipping", in_turns("skipping", turns)))


@story(8, long=True)
def turns_beside_other_axes() -> None:
    """Replicas of such a pipeline, and tensor-parallel ranks in each of its ranks."""
    for more in sampled(({"dp": 2, "zero": 1}, {"tp": 2}), of=2):
        together("gpt", piped("gpt", in_turns("gpt", (1, 2, 1), **more)))


class Views(nn.Module):
    """Two views of each row: all rows of the one, then all of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.other(x)])


@story(2)
def outputs_of_two_views() -> None:
    """All rows of a view stand together, of whichever ranks: replicas, or some that take turns."""

    def inputs(rows: int) -> dict[str, Tensor]:
        return {"x": torch.arange(4.0 * rows).reshape(rows, 4).sin()}

    def loss(outputs: Tensor, batch: object) -> Tensor:
        return outputs.square().mean()

    torch.manual_seed(0)
    model, batch = Views(), inputs(12)
    model.name_in_zoo = "two views"  # type: ignore[assignment]  # for `pipes.once`
    expected = model(batch["x"]).detach()
    for pp, dp, more in ((1, 2, {}), (2, 1, {"turns": (2,)})):
        made: list[Any] = [None]
        if dist.get_rank() == 0:
            wanted = {"pp": pp, "dp": dp, "batch_size": 12, "micro_batches": 3, **more}
            made = [autopipe.plan(model, inputs, loss=loss, cluster=machine(2), **wanted)]
        dist.broadcast_object_list(made)
        assert (made[0].mesh.dp, made[0].turns) == (dp, more.get("turns", ()))
        pipe = autopipe.parallelize(model, made[0], loss=loss)
        close(pipe.evaluate(batch, outputs=True)[1], expected, f"outputs with {more}")
