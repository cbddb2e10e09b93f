"""The loop of `autopipe run`: batches through a pipe, a line of progress, and what it measured."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor

from autopipe import batches
from autopipe.modelfile import ModelFile
from autopipe.plan import Plan, StagePrediction
from autopipe.runtime.meter import Meter
from autopipe.runtime.pipe import Pipe
from autopipe.runtime.record import Recorder, write

LINES = 10
"""How many lines of progress a run prints where there is no terminal to draw a bar on."""


@dataclass(frozen=True)
class Measured:
    """What a run has measured: each stage's worst rank, the median step, and on rank 0 of a traced
    run the share of a step that each stage's rank did not compute."""

    stages: tuple[StagePrediction, ...]
    step_seconds: float
    losses: tuple[float, ...]
    bubbles: tuple[float, ...] = ()


def train(
    pipe: Pipe,
    file: ModelFile,
    steps: int | None,
    seed: int,
    say: Callable[[str], None],
    trace: Path | None = None,
) -> Measured:
    """Train for `steps` steps, or as long as the batches last.

    Every rank calls it; rank 0 talks. Bytes are counted in the second step, seconds in those after
    it: the first one also allocates. A run of fewer steps is measured in those it has.

    Args:
        trace: where to write what every rank did when in the last steps, for ui.perfetto.dev.
    """
    plan, place = pipe.plan, pipe.place
    random.seed(seed)
    torch.manual_seed(seed)  # a `batches` that draws from it draws the same on every rank
    parameters = list(pipe.parameters())
    optimizer = (
        file.optimizer(parameters) if file.optimizer is not None else torch.optim.AdamW(parameters)
    )
    scheduler = file.scheduler(optimizer) if file.scheduler is not None else None
    recorder = Recorder() if trace is not None else None
    pipe.record = recorder.record if recorder is not None else None
    rows = plan.batch.rows
    stream = file.stream(rows, place.dp, plan.mesh.dp, seed)
    losses: list[float] = []
    seconds: list[float] = []
    compute: list[dict[int, StagePrediction]] = []
    memory: dict[int, StagePrediction] | None = None
    with _progress(steps, place.rank == 0, say) as show:
        for step, batch in enumerate(islice(stream, steps)):
            pipe.meter = Meter() if step < 2 else None
            if recorder is not None:
                recorder.begin(step + 1)
            began = perf_counter()
            loss = pipe.step(batch, sharded=file.sharded)
            planned = perf_counter() - began  # what a plan predicts ends with the gradients
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            losses.append(float(loss))
            elapsed = perf_counter() - began
            if step < 2:
                memory = pipe.measured(optimizer)
            if step >= 2:
                seconds.append(planned)
                compute.append(pipe.measured())
            show(step, losses[-1], _rate(batch, plan, file.sharded, elapsed))
    bubbles: tuple[float, ...] = ()
    if recorder is not None and trace is not None:
        world = dist.group.WORLD if len(plan.mesh.places) > 1 else None
        bubbles = write(trace, recorder, plan, trace.stem, place.rank, world)
    if memory is None:
        return Measured((), 0.0, ())
    compute = compute or [pipe.measured()]
    own = {
        stage: StagePrediction(
            statistics.median(found[stage].forward_seconds for found in compute),
            statistics.median(found[stage].backward_seconds for found in compute),
            held.memory,
        )
        for stage, held in memory.items()
    }
    step_seconds = statistics.median(seconds or [planned])
    return Measured(_by_stage(own, plan), step_seconds, tuple(losses), bubbles)


def _by_stage(own: dict[int, StagePrediction], plan: Plan) -> tuple[StagePrediction, ...]:
    """Every rank's measurement, put together: of a stage's replicas the median and the fullest."""
    found: list[dict[int, StagePrediction]] = [own]
    if len(plan.mesh.places) > 1:
        found = [own] * len(plan.mesh.places)
        dist.all_gather_object(found, own)
    stages = []
    for stage in range(len(plan.stages)):
        replicas = [measured[stage] for measured in found if stage in measured]
        stages.append(
            replace(
                max(replicas, key=lambda replica: replica.memory.peak),
                forward_seconds=statistics.median(r.forward_seconds for r in replicas),
                backward_seconds=statistics.median(r.backward_seconds for r in replicas),
            )
        )
    return tuple(stages)


def _rate(batch: Any, plan: Plan, sharded: bool, seconds: float) -> str:
    """Tokens a second where there is a tensor of whole numbers [rows, length]; rows otherwise."""
    leaves = batches.flatten(batch)
    parts = plan.mesh.dp if sharded else 1
    tensors = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor)]
    tokens = next((t for t in tensors if t.ndim == 2 and t.dtype == torch.int64), None)
    if tokens is not None:
        return f"{tokens.numel() * parts / seconds:,.0f} tokens/s"
    return f"{batches.rows_of(plan.inputs, leaves) * parts / seconds:,.1f} rows/s"


Show = Callable[[int, float, str], None]


@contextmanager
def _progress(steps: int | None, talks: bool, say: Callable[[str], None]) -> Iterator[Show]:
    """A bar on a terminal; elsewhere a line now and then."""
    if not talks:
        yield lambda step, loss, rate: None
    elif sys.stderr.isatty():
        columns = [
            TextColumn("step {task.completed}"),
            BarColumn(),
            TextColumn("{task.description}"),
        ]
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=steps)
            yield lambda step, loss, rate: bar.update(
                task, completed=step + 1, description=f"loss {loss:.3f}  {rate}"
            )
    else:
        every = max(1, (steps or 100) // LINES)

        def line(step: int, loss: float, rate: str) -> None:
            if step % every == 0 or step + 1 == steps:
                of = f"/{steps}" if steps else ""
                say(f"step {step + 1}{of}  loss {loss:.3f}  {rate}")

        yield line
