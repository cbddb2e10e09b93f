"""The training loop of `autopipe run`: it shows progress and returns what it measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau

from autopipe.errors import AutopipeError, CheckpointError, ModelError
from autopipe.frontend.model_file import ModelFile
from autopipe.frontend.optimizer import refuse_other_schedules, refuse_others, update
from autopipe.ir.graph import shape_at
from autopipe.planfile import turns
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import StagePrediction
from autopipe.runtime.feed import Feed
from autopipe.runtime.keeping import Keeper, Keeping
from autopipe.runtime.step.executor import clock_of
from autopipe.runtime.step.memory_meter import Meter
from autopipe.runtime.step.pipe import Pipe
from autopipe.runtime.telemetry.destinations import NOWHERE, Destinations, MemorySnapshot
from autopipe.runtime.telemetry.memory_snapshot import GpuBytes, most_bytes, recorded
from autopipe.runtime.telemetry.metrics import Metrics, length_share, of_step, over_ranks, rows_of
from autopipe.runtime.telemetry.progress import figure, progress_shown
from autopipe.runtime.telemetry.record import Recorder, write
from autopipe.runtime.telemetry.sinks import opened
from autopipe.util import seeding

WARM_UP = 2
"""Steps that allocate what later ones use again: their bytes are counted, their seconds are not. So
it is of those after them, until one has kept its gradients: fp16 often begins with overflows."""


@dataclass(frozen=True)
class Measured:
    """The measurements of a run: each stage's worst rank, the median step, and on rank 0, if the
    run is traced, each stage's bubble. `stopped`: whether a signal has ended the run early.
    `gpu`: bytes of the fullest GPU; None on CPUs. `unwritten`: why there is no last checkpoint, or
    on rank 0 no trace; to be raised when the model is saved.
    """

    stages: tuple[StagePrediction, ...]
    step_seconds: float
    losses: tuple[float, ...]
    bubbles: tuple[float, ...] = ()
    stopped: bool = False
    gpu: GpuBytes | None = None
    unwritten: AutopipeError | None = None


def optimizer_for(pipe: Pipe, file: ModelFile) -> torch.optim.Optimizer:
    """The file's optimizer for this rank's parameters.

    Raises:
        ModelError: its settings for a parameter differ from those for the whole model's parameters,
            or will by the file's scheduler.
    """
    make = partial(file.make_optimizer, default=pipe.plan.optimizer)
    # torch's optimizers refuse an empty list: a rank without parameters has one of no elements.
    named = list(pipe.named_parameters()) or [("", next(pipe.parameters()))]
    optimizer = make(named)
    if file.optimizer is not None or file.by_name is not None:
        whole = {n: (shape_at(spec, 1), spec.dtype) for n, spec in pipe.trained_anywhere().items()}
        refuse_others(make, whole, optimizer, named)
        if file.scheduler is not None:
            refuse_other_schedules(make, file.scheduler, whole, named)
    return optimizer


def train(
    pipe: Pipe,
    file: ModelFile,
    steps: int | None,
    say: Callable[[str], None],
    trace: Path | None = None,
    *,
    epochs: int | None = None,
    log_every: int | None = None,
    quiet: bool = False,
    keep_going: bool = False,
    saving: Keeping | None = None,
    metrics: Destinations = NOWHERE,
    snapshot: MemorySnapshot | None = None,
) -> Measured:
    """Train for `steps` steps, or as long as the batches last.

    Every rank calls it; rank 0 talks. Bytes are counted in the first steps (`WARM_UP`), seconds in
    those after them. A run of fewer steps is measured in those it has.

    Args:
        trace: where to write what every rank did when in the last steps, for ui.perfetto.dev.
        epochs: how often to go through the batches; None: once.
        log_every: steps from one line of progress to the next.
        quiet: whether to show no progress.
        keep_going: whether to go on if the loss is no finite number.
        saving: the options about checkpoints; `steps` and `epochs` count from the run's beginning.
        metrics: where metrics of every step, or of every `log_every`th, go; rank 0 writes them.
        snapshot: the step in which each rank on a GPU writes a memory snapshot.

    Raises:
        ModelError: the loss of a step is no finite number: no rank has made its update.
        CheckpointError: there is no whole checkpoint to go on from.
    """
    plan, talks = pipe.plan, pipe.place.rank == 0
    optimizer = optimizer_for(pipe, file)
    scheduler = file.scheduler(optimizer) if file.scheduler is not None else None
    recorder = Recorder() if trace is not None else None
    pipe.record = recorder.record if recorder is not None else None
    feed = Feed(pipe, file, epochs, say)
    readings = _Readings(pipe)
    keeper = Keeper(pipe, optimizer, scheduler, feed, saving, say)
    first = pipe.steps if saving is not None else 0
    remaining = None if steps is None else max(0, steps - first)
    most = min((n for n in (steps, feed.of) if n is not None), default=None)
    one = _OneStep(pipe, file, optimizer, keeper, readings, say, keep_going=keep_going)
    with (
        progress_shown(most, talks and not quiet, say, log_every) as show,
        opened(metrics if talks else NOWHERE, plan, first, say) as log,
    ):
        for step, batch in enumerate(islice(feed, remaining), start=first):
            if recorder is not None:
                recorder.begin(step + 1)
            figures = one.made(step + 1, batch, snapshot)
            show(figures)
            if metrics and (step + 1) % (log_every or 1) == 0:
                log(readings.completed(figures, optimizer))
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(readings.losses[-1])
            elif scheduler is not None:
                scheduler.step()
            if keeper.after_step():
                break
    unwritten: AutopipeError | None = None
    try:
        keeper.close()
    except CheckpointError as error:  # the caller may have a model to save first, and so below
        unwritten = error
    if talks and keeper.stopped is None:
        feed.report_end(steps)
    if talks and snapshot is not None:
        say(snapshot.announcement(range(first + 1, first + 1 + len(readings.losses))))
    bubbles: tuple[float, ...] = ()
    if recorder is not None and trace is not None:
        try:
            bubbles = write(trace, recorder, plan, trace.stem, pipe.place.rank, readings.world)
        except AutopipeError as error:
            unwritten = unwritten or error
    stopped = keeper.stopped is not None
    return replace(readings.measured(bubbles), stopped=stopped, unwritten=unwritten)


@dataclass
class _OneStep:
    """Makes steps of a training: gradients, their norm's limit, the optimizer's update.

    Attributes:
        keep_going: whether to go on if the loss is no finite number.
        overflows: the steps of fp16 so far whose gradients overflowed.
    """

    pipe: Pipe
    file: ModelFile
    optimizer: torch.optim.Optimizer
    keeper: Keeper
    readings: _Readings
    say: Callable[[str], None]
    keep_going: bool
    overflows: int = 0

    def __post_init__(self) -> None:
        self._clock = clock_of(self.pipe.device)

    def made(self, number: int, batch: Any, snapshot: MemorySnapshot | None) -> Metrics:
        """Make step `number`, counted from 1; returns what this rank knows of it."""
        pipe, sharded, clock = self.pipe, self.file.sharded, self._clock
        limit = self.file.max_grad_norm
        pipe.meter = Meter() if self.readings.warming else None
        began, around = perf_counter(), [clock.mark()]
        with recorded(snapshot, number, pipe.place):
            loss = pipe.step(batch, sharded=sharded)
            around.append(clock.mark())  # what a plan predicts ends with the gradients
            self._note(float(loss))
            self._note_overflow(number)
            norm = None if limit is None else float(pipe.clip_grad_norm_(limit))
            self.keeper.before_update()
            update(self.optimizer, seeding.seed(pipe.seed, "optimizer", pipe.steps))
        self.readings.add(clock.seconds(around), self.optimizer)
        elapsed = perf_counter() - began
        rows = rows_of(batch, pipe.plan, sharded=sharded)
        length = length_share(pipe.row_length, pipe.plan)
        figures = of_step(pipe.plan, number, self.readings.losses[-1], elapsed, rows, length)
        return replace(figures, grad_norm=norm)

    def _note(self, loss: float) -> None:
        """Take down a loss; refuse the first one that is no finite number, or say so."""
        self.readings.losses.append(loss)
        error = _not_finite(self.readings.losses)
        if error is not None and not self.keep_going:
            raise error
        if error is not None and self.pipe.place.rank == 0:
            self.say(error.message)

    def _note_overflow(self, number: int) -> None:
        """Say of a step's overflow that it is passed over: of the 1st, 2nd, 4th, ... one."""
        scale = self.pipe.loss_scale
        if self.pipe.kept or scale is None:
            return
        self.overflows += 1
        if self.pipe.place.rank == 0 and self.overflows.bit_count() == 1:
            so_far = f", as {self.overflows} steps so far" if self.overflows > 1 else ""
            self.say(
                f"step {number}: gradients overflowed in fp16, so it changes no weight{so_far}; "
                f"the loss scale is {scale.scale:g} now"
            )


@dataclass
class _Readings:
    """This rank's measurements so far: bytes in the first steps, seconds in those after them.

    `steps`: the number of steps so far. `kept`: whether any step has kept its gradients. `last`,
    `latest`: the last step's seconds, and those of its stages.
    """

    pipe: Pipe
    steps: int = 0
    kept: bool = False
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    compute: list[dict[int, StagePrediction]] = field(default_factory=list)
    memory: dict[int, StagePrediction] | None = None
    latest: dict[int, StagePrediction] = field(default_factory=dict)
    last: float = 0.0

    @property
    def world(self) -> dist.ProcessGroup | None:
        """All ranks of the run; None if there is one."""
        return dist.group.WORLD if len(self.pipe.plan.mesh.places) > 1 else None

    @property
    def warming(self) -> bool:
        """Whether bytes are counted in the step that comes, on every rank alike."""
        return self.steps < WARM_UP or not self.kept

    def add(self, around: Sequence[float], optimizer: torch.optim.Optimizer) -> None:
        """Take down a step: when it began, and when its gradients were there, in seconds."""
        began, ended = around
        self.last = ended - began
        if self.warming:
            self.latest = self.pipe.measured(optimizer)
            fuller = self.memory or {}  # rows may be shorter from one step to the next
            self.memory = {
                stage: max(
                    stage_now, fuller.get(stage, stage_now), key=lambda held: held.memory.peak
                )
                for stage, stage_now in self.latest.items()
            }
        else:
            self.latest = self.pipe.measured()
            self.seconds.append(self.last)
            self.compute.append(self.latest)
        self.steps, self.kept = self.steps + 1, self.kept or self.pipe.kept

    def completed(self, metrics: Metrics, optimizer: torch.optim.Optimizer) -> Metrics:
        """The last step's metrics with what ranks and optimizer know; every rank calls it."""
        pipe = self.pipe
        stages, count = pipe.plan.stages, pipe.plan.batch.micro_batches
        computed = math.fsum(
            turns.rounds(stages, index, count)
            * (seconds.forward_seconds + seconds.backward_seconds)
            for index, seconds in self.latest.items()
        )
        held = sum(stage.memory.peak for stage in (self.memory or {}).values())
        bubble, peak = over_ranks(1 - computed / self.last, held, self.world)
        rate = optimizer.param_groups[0].get("lr")
        return replace(
            metrics,
            bubble=bubble,
            peak_bytes=peak,
            learning_rate=None if rate is None else float(rate),
            loss_scale=None if pipe.loss_scale is None else pipe.loss_scale.scale,
        )

    def measured(self, bubbles: tuple[float, ...]) -> Measured:
        """The medians, with those of the other ranks; every rank calls it."""
        if self.memory is None:
            return Measured((), 0.0, ())
        compute = self.compute or [self.pipe.measured()]
        stages_here = {
            stage: StagePrediction(
                statistics.median(of_batch[stage].forward_seconds for of_batch in compute),
                statistics.median(of_batch[stage].backward_seconds for of_batch in compute),
                here.memory,
            )
            for stage, here in self.memory.items()
        }
        step_seconds = statistics.median(self.seconds or [self.last])
        stages, losses = _by_stage(stages_here, self.pipe.plan), tuple(self.losses)
        gpu = most_bytes(self.pipe.device, self.world)
        return Measured(stages, step_seconds, losses, bubbles, gpu=gpu)


def _not_finite(losses: Sequence[float]) -> ModelError | None:
    """The sentence for a last loss that is the first one not finite."""
    *before, last = losses
    if math.isfinite(last) or not all(map(math.isfinite, before)):
        return None
    after = f", after {figure(before[-1])} in step {len(before)}" if before else ""
    return ModelError(
        f"step {len(losses)}: the loss is {last}{after}",
        hint="a lower learning rate, or a look at this step's batch; --keep-going trains on",
    )


def _by_stage(own: dict[int, StagePrediction], plan: Plan) -> tuple[StagePrediction, ...]:
    """Every rank's measurement, put together: of a stage's replicas the median and the fullest."""
    gathered: list[dict[int, StagePrediction]] = [own]
    if len(plan.mesh.places) > 1:
        gathered = [own] * len(plan.mesh.places)
        dist.all_gather_object(gathered, own)
    stages = []
    for stage in range(len(plan.stages)):
        replicas = [measured[stage] for measured in gathered if stage in measured]
        stages.append(
            replace(
                max(replicas, key=lambda replica: replica.memory.peak),
                forward_seconds=statistics.median(r.forward_seconds for r in replicas),
                backward_seconds=statistics.median(r.backward_seconds for r in replicas),
            )
        )
    return tuple(stages)
