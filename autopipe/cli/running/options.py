"""The options of `autopipe run` in four groups; each checks its own before long work begins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopipe.errors import AutopipeError
from autopipe.terminal.paths import as_asked, check_file
from autopipe.util import atomic_file

if TYPE_CHECKING:
    from autopipe.planfile.contents import Plan
    from autopipe.runtime.telemetry.destinations import Destinations, MemorySnapshot


@dataclass(frozen=True)
class StartOptions:
    """Whether this command starts the ranks, or is one that a launcher has started."""

    local: Annotated[
        int | None, typer.Option(min=1, help="Start this number of processes on this machine.")
    ] = None
    log_dir: Annotated[
        Path | None, typer.Option(help="A folder for what each process started here prints.")
    ] = None

    @property
    def starts_ranks(self) -> bool:
        """Whether ranks are processes of their own: one alone without a log is this process."""
        return self.local is not None and (self.local > 1 or self.log_dir is not None)

    def check(self, *, started_here: bool) -> None:
        """Refuse `--log-dir` for ranks that another launcher starts.

        Raises:
            AutopipeError: names the launchers' own options.
        """
        if self.log_dir is not None and not started_here:
            raise AutopipeError(
                f"--log-dir {self.log_dir} is for processes that are started here, as by --local N",
                hint="torchrun --log-dir FOLDER --tee 3; srun --output FOLDER/%t.log",
            )


@dataclass(frozen=True)
class TrainingOptions:
    """What is trained, from which weights, and for how long."""

    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to train; default: until the batches end.")
    ] = None
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Times to go through the batches; default: once.")
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Seed of weights, dropout and batches; default: 0.")
    ] = None
    weights: Annotated[
        Path | None, typer.Option(help="Weights to start from: a file, or a run's checkpoints.")
    ] = None
    model: Annotated[str | None, typer.Option(help="The model file, if it has moved.")] = None
    max_grad_norm: Annotated[
        float | None,
        typer.Option(help="Clip gradients by their norm to this; else as the model file says."),
    ] = None
    offload: Annotated[
        bool, typer.Option("--offload", help="Keep shards of ZeRO-3 in the host's memory.")
    ] = False
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on even if the loss is nan or infinite.")
    ] = False

    def check(self) -> None:
        """Refuse a seed that torch's generators do not take.

        Raises:
            AutopipeError: names the seed.
        """
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise AutopipeError(
                f"--seed {self.seed} has more than 64 bits", hint="any number from 0 to 2**64 - 1"
            )


@dataclass(frozen=True)
class CheckpointOptions:
    """Whether checkpoints are written, and whether the run goes on from one."""

    folder: Annotated[
        Path | None,
        typer.Option(
            "--checkpoints", help="A folder for checkpoints; one at the end, on Ctrl-C and SIGTERM."
        ),
    ] = None
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps from one checkpoint to the next.")
    ] = None
    keep: Annotated[int | None, typer.Option(min=1, help="How many checkpoints stay; 3.")] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False
    replan: Annotated[
        bool, typer.Option("--replan", help="Make a new plan if the devices are not the plan's.")
    ] = False

    def check(self) -> None:
        """Refuse a folder that cannot take this run's checkpoints, or options without a folder.

        Raises:
            AutopipeError: names the option.
        """
        if self.folder is None:
            asked = {
                "--save-every": self.save_every is not None,
                "--keep": self.keep is not None,
                "--resume": self.resume,
                "--replan": self.replan,
            }
            for option in [name for name, is_given in asked.items() if is_given]:
                raise AutopipeError(
                    f"{option} needs a folder of checkpoints, and none was given",
                    hint=f"--checkpoints FOLDER {option}",
                )
            return
        from autopipe.runtime.checkpoint.folder import checkpoints_in

        atomic_file.check_new_folder(self.folder, "--checkpoints")
        earlier = checkpoints_in(self.folder)
        if earlier and not self.resume:
            raise AutopipeError(
                f"--checkpoints {self.folder} has {earlier[0][1].name} of an earlier run",
                hint="--resume goes on from it; to begin anew, give another folder",
            )


@dataclass(frozen=True)
class OutputOptions:
    """What the run writes beside its checkpoints."""

    save: Annotated[
        Path | None, typer.Option(help="Save the whole model at the end, as FILE.safetensors.")
    ] = None
    record: Annotated[
        Path | None, typer.Option(help="A folder for what `autopipe report` shows of the run.")
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="Write what every rank did when, for ui.perfetto.dev.")
    ] = None
    metrics: Annotated[
        Path | None, typer.Option(help="Write each step's figures, as lines of JSON.")
    ] = None
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write these figures for TensorBoard, into this folder.")
    ] = None
    wandb: Annotated[
        str | None,
        typer.Option(help="Log these figures to W&B, in this project; W&B finds its own key."),
    ] = None
    log_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps from one line with the loss to the next; --metrics, --tensorboard, --wandb "
            "and --record get the figures of these steps only.",
        ),
    ] = None
    memory_snapshot: Annotated[
        int | None,
        typer.Option(min=1, help="Write what each GPU's memory held in this step, into --record."),
    ] = None

    def checked(self, plan: Plan, steps: int | None, *, leads: bool, resume: bool) -> Outputs:
        """The files of this run, each in a place that can be written to; makes `--record`'s folder.

        Args:
            steps: the number of steps that the run is to make, if that is known.
            leads: whether this is the process that writes metrics and the record.
            resume: whether the run may go on from an earlier one.

        Raises:
            AutopipeError: names the option whose file or folder cannot be written.
        """
        from autopipe.report import recorded
        from autopipe.runtime.telemetry import destinations

        snapshot, metrics, trace = None, self.metrics, self.trace
        also: Path | None = None
        if self.memory_snapshot is not None:
            snapshot = destinations.snapshot_of(self.memory_snapshot, self.record, plan, steps)
        if self.record is not None:
            recorded.begin(self.record, leads=leads, resume=resume)
            also = self.record / recorded.METRICS
            if metrics is None or metrics.resolve() == also.resolve():
                metrics, also = also, None
            trace = trace or self.record / recorded.TRACE
        check_file(trace)
        if self.save is not None:
            atomic_file.check_model(self.save)
        to = destinations.Destinations(metrics, self.tensorboard, self.wandb, also)
        if leads:
            destinations.check(to, resume=resume)
        return Outputs(self.save, self.record, trace, to, self.log_every, snapshot)


@dataclass(frozen=True)
class Outputs:
    """The files and folders that a run writes beside its checkpoints.

    Attributes:
        save: the trained model, at the end.
        record: the folder that `autopipe report` reads; it has a trace and a metrics' file too,
            also where these are asked for elsewhere.
        log_every: steps from one logged step to the next; None: each is logged.
        snapshot: the step of which GPUs' memory is written down.
    """

    save: Path | None
    record: Path | None
    trace: Path | None
    metrics: Destinations
    log_every: int | None
    snapshot: MemorySnapshot | None

    def as_asked(self) -> Outputs:
        """The same where a model file has called `os.chdir` since."""
        to = self.metrics
        return replace(
            self,
            save=self.save and as_asked(self.save),
            record=self.record and as_asked(self.record),
            trace=self.trace and as_asked(self.trace),
            metrics=replace(
                to,
                file=to.file and as_asked(to.file),
                tensorboard=to.tensorboard and as_asked(to.tensorboard),
                record=to.record and as_asked(to.record),
            ),
            snapshot=self.snapshot
            and replace(self.snapshot, folder=as_asked(self.snapshot.folder)),
        )
