"""The folder of a run's checkpoints: names, and how a checkpoint is completed and removed.

    step-00000010/                  whole: all ranks' files, on the disk
    step-00000020/                  whole, the newest
    step-00000030.4be1c9a2.partial/ being written, or left behind by a run that was killed
    step-00000040.damaged/          found damaged by a run that wanted to load it

A partial folder is renamed when the manifests of all ranks are in it; the rename makes it a
checkpoint. If a killed run has left a partial folder, the next run renames it if it is complete and
else removes it. The eight digits are drawn by each run, so that a surviving process of an earlier
run writes into another folder.
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
    """The step in a checkpoint's name; None: the name is another, as after a user's rename."""
    match = _WHOLE.fullmatch(folder.resolve().name)
    return int(match[1]) if match else None


def partial_name(step: int, run: str) -> str:
    """A checkpoint's name while the run with the eight digits `run` writes it."""
    return f"{step_name(step)}.{run}.partial"


def tensors_name(rank: int) -> str:
    """The name of a rank's file of tensors."""
    return f"rank-{rank}.safetensors"


def manifest_name(rank: int) -> str:
    """The name of a rank's manifest."""
    return f"rank-{rank}.json"


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """The whole checkpoints of a run, newest first, each with its step."""
    return sorted(((step, path) for step, path in _named(folder, _WHOLE)), reverse=True)


def is_one(folder: Path) -> bool:
    """Whether a folder is a checkpoint, and not a folder of checkpoints."""
    return (folder / manifest_name(0)).is_file()


def candidates(folder: Path) -> list[Path]:
    """The checkpoints to resume from, the best one first: the folder itself, or those in it."""
    return [folder] if is_one(folder) else [path for _, path in checkpoints_in(folder)]


def commit(partial: Path, keep: int) -> Path:
    """Rename a partial folder that all ranks have written, and remove old checkpoints.

    One rank calls it. If that rank is killed, `checkpoints.recover` finishes in the next run.

    Returns:
        Where the checkpoint is now.
    """
    folder, whole = partial.parent, partial.parent / partial.name.partition(".")[0]
    sync(partial)
    if whole.exists():  # this run has resumed from an earlier step and reached this one again
        remove(whole)
    os.rename(partial, whole)
    sync(folder)
    rotate(folder, keep)
    return whole


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint to `step-00000030.damaged`, which is never loaded."""
    aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
    with suppress(OSError):
        if aside.exists():
            remove(aside)
        os.rename(checkpoint, aside)
    return aside


def rotate(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the `keep` newest."""
    for _, path in checkpoints_in(folder)[keep:]:
        remove(path)


def sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def partials(folder: Path) -> list[Path]:
    """The partial folders: being written, or left by a killed run."""
    return [path for _, path in sorted(_named(folder, _PARTIAL))]


def _named(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    if folder.is_dir():
        for path in folder.iterdir():
            match = pattern.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink():
                yield int(match[1]), path


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint so that a kill in between leaves no folder that looks whole.

    The folder is renamed first, as to remove its files may take a while. Of a link the folder that
    it leads to stays.
    """
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    going = checkpoint
    if not checkpoint.suffix:
        going = checkpoint.with_name(
            partial_name(int(checkpoint.name.removeprefix("step-")), "0" * 8)
        )
        shutil.rmtree(going, ignore_errors=True)
        with suppress(OSError):
            os.rename(checkpoint, going)
    # The manifest goes first: without it the remaining files do not look like a checkpoint.
    with suppress(OSError):
        (going / manifest_name(0)).unlink()
    shutil.rmtree(going, ignore_errors=True)
