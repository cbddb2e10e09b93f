"""Where a run is to write its metrics, checked before long work; without torch, as parents are.

Packages that write them are extras of autopipe's: `pip install 'autopipe[tensorboard]'`, `[wandb]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from autopipe.errors import AutopipeError
from autopipe.util import atomic_file


@dataclass(frozen=True)
class Destinations:
    """Where the metrics of a run go.

    Attributes:
        file: of JSON lines, one object a logged step.
        tensorboard: a folder for its event files.
        wandb: a project of W&B's.
    """

    file: Path | None = None
    tensorboard: Path | None = None
    wandb: str | None = None

    def __bool__(self) -> bool:
        return any(where is not None for where in vars(self).values())


NOWHERE = Destinations()
"""Metrics are on the terminal alone."""


def check(to: Destinations, *, resume: bool) -> None:
    """Refuse, before long work, what cannot be written to.

    Args:
        resume: the run may go on from an earlier one, whose lines the file has.

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
        if to.tensorboard.exists() and not to.tensorboard.is_dir():
            raise AutopipeError(f"--tensorboard {to.tensorboard}: expected a folder, found a file")
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
