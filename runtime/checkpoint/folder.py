"""The folder of a run's checkpoints: their names, and how one becomes whole, or goes.

    step-00000010/                  whole: all ranks' files, on the disk
    step-00000020/                  whole, the newest
    step-00000030.4be1c9a2.partial/ being written, or left behind by a run that was killed
    step-00000040.damaged/          was passed over

A partial folder is renamed when the manifests of all ranks are in it: that is the one moment at
which a checkpoint begins to be one. What a killed run has left behind is renamed by the next run if
all of it is there, and removed otherwise. The eight digits are the run's own: a process of an
earlier one that is still alive writes into another folder.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PLAN = "plan.json"
"""The plan that the run was made by, beside the ranks' files."""

_WHOLE = re.compile(r"step-(\d{8,15})")
_PARTIAL = re.compile(r"step-(\d{8,15})\.[0-9a-f]{8}\.partial")


def step_name(step: int) -> str:
    """The name of a checkpoint: `step-00000020`."""
    return f"step-{step:08}"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint is of by its name; None: somebody has given it another one."""
    match = _WHOLE.fullmatch(folder.resolve().name)
    return int(match[1]) if match else None


def partial_name(step: int, run: str) -> str:
    """The name that it has while it is written by the run with these digits."""
    return f"{step_name(step)}.{run}.partial"


def tensors_name(rank: int) -> str:
    """The file of a rank's tensors."""
    return f"rank-{rank}.safetensors"


def manifest_name(rank: int) -> str:
    """The file that tells what a rank has written."""
    return f"rank-{rank}.json"


def found(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run, whole ones only, newest first, each with its step."""
    return sorted(((step, path) for step, path in _named(folder, _WHOLE)), reverse=True)


def is_one(folder: Path) -> bool:
    """Whether this is a checkpoint itself, and no folder of them."""
    return (folder / manifest_name(0)).is_file()


def candidates(folder: Path) -> list[Path]:
    """The checkpoints to resume from, the best one first: the folder itself, or those in it."""
    return [folder] if is_one(folder) else [path for _, path in found(folder)]


def commit(partial: Path, keep: int) -> Path:
    """Make a checkpoint of a partial folder that all ranks have written, and let go of old ones.

    One rank calls it. If it is killed, `checkpoints.recover` does what is left.

    Returns:
        Where the checkpoint is now.
    """
    folder, whole = partial.parent, partial.parent / partial.name.partition(".")[0]
    sync(partial)
    if whole.exists():  # a run that resumed from an earlier one has come by again
        remove(whole)
    os.rename(partial, whole)
    sync(folder)
    rotate(folder, keep)
    return whole


def set_aside(checkpoint: Path) -> Path:
    """Give a damaged checkpoint a name that is none: `step-00000030.damaged`."""
    aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
    with suppress(OSError):
        if aside.exists():
            remove(aside)
        os.rename(checkpoint, aside)
    return aside


def rotate(folder: Path, keep: int) -> None:
    """Let go of all but the newest checkpoints."""
    for _, path in found(folder)[keep:]:
        remove(path)


def sync(folder: Path) -> None:
    """Bring the names in a folder onto the disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def partials(folder: Path) -> list[Path]:
    """What is being written, or was left behind."""
    return [path for _, path in sorted(_named(folder, _PARTIAL))]


def _named(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    if folder.is_dir():
        for path in folder.iterdir():
            match = pattern.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink():
                yield int(match[1]), path


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint; a run that is killed meanwhile leaves none that looks whole.

    Its name goes first: the rest may take a while.
    """
    going = checkpoint
    if not checkpoint.suffix:
        going = checkpoint.with_name(
            partial_name(int(checkpoint.name.removeprefix("step-")), "0" * 8)
        )
        shutil.rmtree(going, ignore_errors=True)
        with suppress(OSError):
            os.rename(checkpoint, going)
    # The manifest first: without it the remaining files are not taken for a checkpoint.
    with suppress(OSError):
        (going / manifest_name(0)).unlink()
    shutil.rmtree(going, ignore_errors=True)
