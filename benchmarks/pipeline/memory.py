"""Bytes alive in a rank at the fullest moment of a step, counted at torch's allocator.

    live  = what a side holds between steps (buffers kept, shapes probed) + what a step adds
    saved = what autograd keeps of one micro-batch of the stage (the unit A of the table)

The count begins before a side is built and its last step is looked at, so that buffers a side keeps
for its lifetime are in it. Parameters were there before; gradients are taken out: everybody has
them once. The batch is not counted either: it was there before, and micro-batches are views of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.pipeline.stages import Side

_MARK = "the step that is looked at"


def peak(make: Callable[[], Callable[[], None]], steps: int = 2) -> int:
    """Bytes alive at the fullest moment of the last of `steps` steps, since before `make`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = make()
        for _ in range(steps - 1):
            step()
        with record_function(_MARK):
            step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == _MARK)
    alive = highest = 0
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    for when, change in changes:
        alive += change
        if when >= begin:
            highest = max(highest, alive)
    return highest


def saved(stage: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps of one micro-batch of a stage, its input and output included."""
    owned = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = tensor  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage(x.clone().requires_grad_())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def row(name: str, side: Side, conditions: dict[str, Any]) -> dict[str, Any]:
    """One side's bytes, rank by rank; every rank calls it and gets the row."""
    side.model.zero_grad()
    highest = peak(side.make)
    gradients = [p.grad.nbytes for p in side.model.parameters() if p.grad is not None]
    live: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(live, highest - sum(gradients))
    chunks = len(side.model.stages) // len(live)
    unit = chunks * saved(side.model.stages[0], side.model.batch[: side.model.rows])
    return {
        "side": name,
        **conditions,
        "live_bytes": live,
        "saved_bytes": unit,
        "live_in_saved": [round(bytes / unit, 2) for bytes in live],
    }
