"""What is to be done about a folder of checkpoints when a run begins."""

from __future__ import annotations

from pathlib import Path

from autopipe.errors import CheckpointError
from autopipe.runtime.checkpoint.folder import commit, found, is_one, partials, remove
from autopipe.runtime.checkpoint.stored import Stored


def recover(folder: Path, keep: int) -> None:
    """Finish or remove what earlier runs have left behind; one rank calls it, before any saves."""
    for partial in partials(folder):
        whole = partial.with_name(partial.name.partition(".")[0])
        if not whole.exists() and _is_complete(partial):
            commit(partial, keep)
        else:
            remove(partial)


def candidates(folder: Path) -> list[Path]:
    """The checkpoints to resume from, the best one first: the folder itself, or those in it."""
    return [folder] if is_one(folder) else [path for _, path in found(folder)]


def _is_complete(partial: Path) -> bool:
    """Whether all ranks' files are there: each wrote its manifest last."""
    try:
        Stored.open(partial)
    except CheckpointError:
        return False
    return True
