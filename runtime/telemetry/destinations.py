"""The destinations of a run's metrics, checked before long work; imports no torch, since the
processes that start ranks load none.

Packages that write them are extras of autopipe's: `pip install 'autopipe[tensorboard]'`, `[wandb]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from autopipe.errors import AutopipeError
from autopipe.planfile.contents import Plan
from autopipe.util import atomic_file
from autopipe.util.numbers import count


@dataclass(frozen=True)
class Destinations:
    """Where the metrics of a run go.

    Attributes:
        file: a file of JSON lines, one object a logged step.
        record: a second such file, in the run's folder.
        tensorboard: a folder for its event files.
        wandb: a project of W&B's.
    """

    file: Path | None = None
    tensorboard: Path | None = None
    wandb: str | None = None
    record: Path | None = None

    def __bool__(self) -> bool:
        return any(where is not None for where in vars(self).values())


NOWHERE = Destinations()
"""Metrics are on the terminal alone."""


@dataclass(frozen=True)
class MemorySnapshot:
    """The snapshot of each GPU's memory in one step, a file of each rank.

    Attributes:
        step: the step, counted from 1, from the run's beginning.
        folder: the run's folder.
    """

    step: int
    folder: Path

    def file(self, rank: int) -> Path:
        """The file of one rank."""
        return self.folder / f"snapshot-rank{rank:05}.pickle"

    def announcement(self, steps: range) -> str:
        """A line on where the files are, or that a run of so many steps has made none."""
        if self.step not in steps:
            last = f", the last was {steps[-1]}" if steps else ""
            return f"--memory-snapshot {self.step}: this run has not made that step{last}"
        return (
            f"{self.file(0)}, and a file of each other rank: a GPU's memory in step {self.step}; "
            "https://pytorch.org/memory_viz shows it"
        )


def snapshot_of(step: int, folder: Path | None, plan: Plan, steps: int | None) -> MemorySnapshot:
    """The snapshot of a step that `--memory-snapshot` asks for.

    Args:
        folder: the folder of `--record`.
        steps: the number of steps that the run is to make, if that is known.

    Raises:
        AutopipeError: there is no folder, no GPU or no such step.
    """
    asked = f"--memory-snapshot {step}"
    if all(place.device == "cpu" for place in plan.mesh.places):
        ranks = count(len(plan.mesh.places), "rank")
        raise AutopipeError(
            f"{asked} is of the memory of GPUs, and the plan is for {ranks} on CPUs",
            hint="`autopipe explain PLAN` has the bytes of each stage",
        )
    if steps is not None and step > steps:
        raise AutopipeError(
            f"{asked} is of a step that the run does not make, with --steps {steps}",
            hint=f"a step from 1 to {steps}",
        )
    if folder is None:
        raise AutopipeError(
            f"{asked} is a file of each rank, and there is no folder for them",
            hint=f"--record FOLDER {asked}",
        )
    return MemorySnapshot(step, folder)


def check(to: Destinations, *, resume: bool) -> None:
    """Refuse, before long work, destinations that cannot be written to.

    Args:
        resume: whether the run may go on from an earlier one, whose lines the file has.

    Raises:
        AutopipeError: a folder or a package is not there; or the file is of another run.
    """
    if to.file is not None:
        if to.file.is_dir():
            raise AutopipeError(
                f"--metrics {to.file}: expected a file, found a folder",
                hint=f"--metrics {to.file / 'metrics.jsonl'}",
            )
        atomic_file.check_folder(to.file)
        if to.file.is_file() and to.file.stat().st_size and not resume:
            raise AutopipeError(
                f"--metrics {to.file} has lines of an earlier run",
                hint="--resume goes on after them; to begin anew, give another file",
            )
    if to.tensorboard is not None:
        _need("tensorboard", f"--tensorboard {to.tensorboard}")
        atomic_file.check_new_folder(to.tensorboard, "--tensorboard")
    if to.wandb is not None:
        _need("wandb", f"--wandb {to.wandb}")


def _need(package: str, option: str) -> None:
    # By its distribution: a folder `wandb` of earlier runs would be found as a module.
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise AutopipeError(
            f"{option} is written by {package}, which is not installed",
            hint=f"pip install 'autopipe[{package}]'",
        ) from None
