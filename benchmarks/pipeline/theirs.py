"""torch.distributed.pipelining as a user calls it: `PipelineStage`s, a schedule, `step`.

Shapes are given (no inference step), gradients are sums (no pass that scales them) and outputs are
not merged: the quickest way that its public interface has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed import pipelining

from benchmarks.pipeline.stages import Model, loss

SINGLE = {"ScheduleGPipe", "Schedule1F1B"}
"""Schedules of one stage a rank, which take it by itself."""


def held(schedule: str, rank: int, ranks: int, chunks: int) -> list[int]:
    """The stages of a rank: rank, rank + ranks, ...; in a V: rank, and the same from the end."""
    if schedule == "ScheduleZBVZeroBubble":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * chunk for chunk in range(chunks)]


def make(schedule: str, model: Model, rank: int, ranks: int) -> Callable[[], None]:
    """One training step of torch's `schedule` over the model's batch."""
    count = len(model.stages)
    own = held(schedule, rank, ranks, count // ranks)
    example = model.batch[: model.rows]
    stages = [
        pipelining.PipelineStage(
            model.stages[index],
            index,
            count,
            torch.device("cpu"),
            input_args=example.clone().requires_grad_(index > 0),
            output_args=example.clone().requires_grad_(),
        )
        for index in own
    ]
    of_stages: pipelining.PipelineStage | Sequence[pipelining.PipelineStage] = stages
    if schedule in SINGLE:
        (of_stages,) = stages
    made = getattr(pipelining, schedule)(
        of_stages, model.micro_batches, loss_fn=loss, scale_grads=False
    )
    args = (model.batch,) if 0 in own else ()
    target = {"target": model.target} if count - 1 in own else {}

    def step() -> None:
        made.step(*args, **target, return_outputs=False)

    return step
