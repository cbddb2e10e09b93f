"""The training loop of `autopipe run`: it shows progress and returns what it measured."""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor

from autopipe.errors import ModelError
from autopipe.frontend import batch as batches
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import StagePrediction
from autopipe.runtime.feed import Feed
from autopipe.runtime.keeping import Keeper, Keeping
from autopipe.runtime.record import Recorder, write
from autopipe.runtime.step.memory_meter import Meter
from autopipe.runtime.step.pipe import Pipe

LINES = 10
"""How many lines of progress a run prints where there is no terminal to draw a bar on."""

WARM_UP = 2
"""Steps that allocate what later ones use again: their bytes are counted, their seconds are not."""


@dataclass(frozen=True)
class Measured:
    """What a run has measured: each stage's worst rank, the median step, and on rank 0 of a traced
    run the share of a step that each stage's rank did not compute. `stopped`: a signal has ended it
    early."""

    stages: tuple[StagePrediction, ...]
    step_seconds: float
    losses: tuple[float, ...]
    bubbles: tuple[float, ...] = ()
    stopped: bool = False


def train(
    pipe: Pipe,
    file: ModelFile,
    steps: int | None,
    seed: int,
    say: Callable[[str], None],
    trace: Path | None = None,
    *,
    epochs: int | None = None,
    log_every: int | None = None,
    quiet: bool = False,
    keep_going: bool = False,
    saving: Keeping | None = None,
) -> Measured:
    """Train for `steps` steps, or as long as the batches last.

    Every rank calls it; rank 0 talks. Bytes are counted in the second step, seconds in those after
    it: the first one also allocates. A run of fewer steps is measured in those it has.

    Args:
        trace: where to write what every rank did when in the last steps, for ui.perfetto.dev.
        epochs: how often to go through the batches; None: once.
        log_every: steps from one line of progress to the next.
        quiet: no progress.
        keep_going: even if the loss is no finite number.
        saving: what to keep of the run, and whether to go on from it; `steps` and `epochs` count
            from the run's beginning.

    Raises:
        ModelError: the loss of a step is no finite number: no rank has made its update.
        CheckpointError: there is no whole checkpoint to go on from, or the last one could not be
            written.
    """
    plan, talks = pipe.plan, pipe.place.rank == 0
    random.seed(seed)
    torch.manual_seed(seed)  # a `batches` that draws from it draws the same on every rank
    # torch's optimizers refuse an empty list: a rank without parameters has one of no elements.
    named = list(pipe.named_parameters()) or [("", next(pipe.parameters()))]
    optimizer = file.make_optimizer(named, plan.optimizer)
    scheduler = file.scheduler(optimizer) if file.scheduler is not None else None
    recorder = Recorder() if trace is not None else None
    pipe.record = recorder.record if recorder is not None else None
    feed = Feed(pipe, file, seed, epochs, say)
    readings = _Readings(pipe)
    keeper = Keeper(pipe, optimizer, scheduler, feed, saving, say)
    first = pipe.steps if saving is not None else 0
    left = None if steps is None else max(0, steps - first)
    most = min((n for n in (steps, feed.of) if n is not None), default=None)
    with progress_shown(most, talks and not quiet, say, log_every) as show:
        for step, batch in enumerate(islice(feed, left), start=first):
            pipe.meter = Meter() if step - first < WARM_UP else None
            if recorder is not None:
                recorder.begin(step + 1)
            began = perf_counter()
            loss = pipe.step(batch, sharded=file.sharded)
            seconds = perf_counter() - began  # what a plan predicts ends with the gradients
            readings.losses.append(float(loss))
            if (gone := _gone(readings.losses)) is not None:
                if not keep_going:
                    raise gone
                if talks:
                    say(gone.message)
            keeper.before_update()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            elapsed = perf_counter() - began
            readings.add(step - first, seconds, optimizer)
            show(step, readings.losses[-1], throughput(batch, plan, file.sharded, elapsed))
            if keeper.after_step():
                break
    keeper.close()
    if talks and keeper.stopped is None:
        feed.dry(steps)
    bubbles: tuple[float, ...] = ()
    if recorder is not None and trace is not None:
        world = dist.group.WORLD if len(plan.mesh.places) > 1 else None
        bubbles = write(trace, recorder, plan, trace.stem, pipe.place.rank, world)
    return replace(readings.measured(bubbles), stopped=keeper.stopped is not None)


@dataclass
class _Readings:
    """What this rank has measured so far: bytes in the first steps, seconds in those after them."""

    pipe: Pipe
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    compute: list[dict[int, StagePrediction]] = field(default_factory=list)
    memory: dict[int, StagePrediction] | None = None
    last: float = 0.0

    def add(self, step: int, seconds: float, optimizer: torch.optim.Optimizer) -> None:
        """Take down the step that has just ended; its gradients were there after `seconds`."""
        self.last = seconds
        if step < WARM_UP:
            self.memory = self.pipe.measured(optimizer)
        else:
            self.seconds.append(seconds)
            self.compute.append(self.pipe.measured())

    def measured(self, bubbles: tuple[float, ...]) -> Measured:
        """The medians, with those of the other ranks; every rank calls it."""
        if self.memory is None:
            return Measured((), 0.0, ())
        compute = self.compute or [self.pipe.measured()]
        own = {
            stage: StagePrediction(
                statistics.median(found[stage].forward_seconds for found in compute),
                statistics.median(found[stage].backward_seconds for found in compute),
                held.memory,
            )
            for stage, held in self.memory.items()
        }
        step_seconds = statistics.median(self.seconds or [self.last])
        return Measured(_by_stage(own, self.pipe.plan), step_seconds, tuple(self.losses), bubbles)


def _gone(losses: Sequence[float]) -> ModelError | None:
    """What is to be said when the last loss is the first that is no finite number."""
    *before, last = losses
    if math.isfinite(last) or not all(map(math.isfinite, before)):
        return None
    after = f", after {figure(before[-1])} in step {len(before)}" if before else ""
    return ModelError(
        f"step {len(losses)}: the loss is {last}{after}",
        hint="a lower learning rate, or a look at this step's batch; --keep-going trains on",
    )


def figure(loss: float) -> str:
    """A loss with four significant digits at least, and three decimals.

    >>> figure(5.7768), figure(0.25), figure(0.0123456), figure(1.5e-7), figure(1234.5678)
    ('5.777', '0.2500', '0.01235', '1.500e-07', '1234.568')
    """
    if not math.isfinite(loss) or 0 < abs(loss) < 1e-5:
        return f"{loss:.3e}"
    digits = 3 - math.floor(math.log10(abs(loss))) if loss else 3
    return f"{loss:.{max(3, digits)}f}"


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


def throughput(batch: Any, plan: Plan, sharded: bool, seconds: float) -> str:
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
def progress_shown(
    steps: int | None, talks: bool, say: Callable[[str], None], log_every: int | None = None
) -> Iterator[Show]:
    """A bar on a terminal; elsewhere, or if asked for, a line now and then."""
    of = f"/{steps}" if steps else ""
    ended: list[float] = []

    def words(step: int, loss: float, rate: str) -> str:
        ended.append(perf_counter())
        told = f"loss {figure(loss)}  {rate}"
        if steps and step:  # the first one takes longer than any other
            left = (ended[-1] - ended[0]) / step * (steps - step - 1)
            told += f"  {_clock(left)} left" if left >= 1 else ""
        return told

    if not talks:
        yield lambda step, loss, rate: None
    elif sys.stderr.isatty():
        columns = [
            TextColumn("step {task.completed}" + of),
            BarColumn(),
            TextColumn("{task.description}"),
        ]
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=steps)

            def draw(step: int, loss: float, rate: str) -> None:
                told = words(step, loss, rate)
                if log_every and (step + 1) % log_every == 0:
                    bar.console.print(f"step {step + 1}{of}  {told}", highlight=False)
                bar.update(task, completed=step + 1, description=told)

            yield draw
    else:
        every = log_every or max(1, (steps or 100) // LINES)
        offset = 1 if log_every else 0

        def tell(step: int, loss: float, rate: str) -> None:
            told = words(step, loss, rate)
            if (step + offset) % every == 0 or step + 1 == steps:
                say(f"step {step + 1}{of}  {told}")

        yield tell


def _clock(seconds: float) -> str:
    """`40 s`, `12:05` minutes or `3:12:05` hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
