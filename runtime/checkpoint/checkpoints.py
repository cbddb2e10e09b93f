"""A run's checkpoints: written beside its steps, loaded from the newest one that is whole.

    step 20 ends      begin        a thread writes this rank's file ...
    step 21           forward, backward                ... from the tensors themselves
                      settle       the optimizer is about to change the tensors: wait for the thread
                      optimizer.step
                      agree        if all ranks have written, rank 0 renames the folder; else it
                                   removes it

Between two steps of the optimizer no parameter changes, so the thread reads parameters where they
lie. Buffers and tensors on a GPU are copied first. `agree` is one small all-reduce a step.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from autopipe.errors import AutopipeError, CheckpointError, DamagedError
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Place
from autopipe.runtime.checkpoint import folder as folders
from autopipe.runtime.checkpoint.content import (
    Content,
    check_stored,
    rank_file,
    restore,
    values,
)
from autopipe.runtime.checkpoint.stored import Stored
from autopipe.runtime.checkpoint.write import RankFile, write

Made = TypeVar("Made")

_DAMAGE = (DamagedError, OSError)

KEEP = 3
"""How many checkpoints a run keeps by default."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded: its folder, its number of steps, and the run's values in it.

    `schedule`: the class of the learning-rate schedule whose state it has; None: it has none.
    """

    folder: Path
    step: int
    values: Mapping[str, Any]
    schedule: str | None = None


class _Failure(NamedTuple):
    """Why a rank could not load a checkpoint: whether it is damaged, a sentence, a hint or ""."""

    is_damage: bool
    sentence: str
    hint: str


@dataclass
class _Writing:
    """A checkpoint on its way to the disk."""

    step: int
    partial: Path
    thread: Thread | None = None
    error: str | None = None


class Checkpoints:
    """The checkpoints of one run, in one folder; all ranks make the same calls in the same order.

    Args:
        folder: the folder of the run's checkpoints, which the first one makes; for `load` it may be
            a checkpoint itself.
        world: the group of all ranks of the run; None: this rank is alone.
        keep: how many checkpoints to keep; older ones are removed.
        say: called on rank 0 with a line for the user.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        place: Place,
        world: dist.ProcessGroup | None,
        *,
        keep: int = KEEP,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._folder = folder
        self._plan, self._place, self._world = plan, place, world
        self._keep = keep
        self._say = say if say is not None and place.rank == 0 else lambda line: None
        self._run: str = self._from_first(lambda: secrets.token_hex(4))
        self._writing: _Writing | None = None
        self._failed: str | None = None
        self._seen: set[int] | None = None  # on rank 0, the steps of checkpoints in the folder

    def load(self, content: Content) -> Loaded | None:
        """Load the newest checkpoint that is whole; the folder itself, if it is a checkpoint.

        Damaged checkpoints are passed over with a line to the user, and renamed. One of another
        model, optimizer or schedule is refused on every rank before any has changed a tensor.

        Returns:
            The checkpoint; None: the folder has none.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer, or none is whole.
        """
        paths = self._from_first(self._offered)
        damaged = []
        for number, path in enumerate(paths):
            stored, wrong = self._tried(partial(_opened, path, content))
            if stored is not None and not wrong:
                _, wrong = self._tried(partial(restore, content, stored))
            if not wrong:
                assert stored is not None
                if self._place.rank == 0:
                    for damaged_path in paths[:number]:
                        folders.set_aside(damaged_path)
                run_values = values(stored, self._place.dp, self._plan.mesh.dp)
                schedule = stored.manifests[0].training.get("schedule")
                return Loaded(path, stored.step, run_values, schedule)
            is_damage, sentence, hint = wrong[0]
            if not is_damage:
                raise CheckpointError(sentence, hint=hint or None)
            damaged.append(sentence)
            older = paths[number + 1 :]
            instead = f"{older[0].name} is used instead" if older else "there is no earlier one"
            self._say(f"{sentence}; {instead}")
        if damaged:
            raise CheckpointError(
                f"{self._folder}: none of {len(damaged)} checkpoints is whole; the newest: "
                f"{damaged[0]}",
                hint="to begin anew, give another folder",
            )
        return None

    def _tried(self, call: Callable[[], Made]) -> tuple[Made | None, list[_Failure]]:
        """What a call returns on this rank, and the failures on all ranks; every rank calls it.

        Returns:
            The result, None if it failed here; the failures, those that are no damage first.
        """
        made, failure = None, None
        try:
            made = call()
        except (AutopipeError, OSError) as error:
            hint = getattr(error, "hint", None) or ""
            failure = _Failure(isinstance(error, _DAMAGE), _described(error), hint)
        found = self._everyone(failure)
        return made, sorted(each for each in found if each is not None)  # False < True

    def begin(self, content: Content, step: int, run_values: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint, after `agree` on the one before.

        Raises:
            CheckpointError: a checkpoint cannot hold some state of the optimizer or the schedule.
        """
        assert self._writing is None
        ranks = len(self._plan.mesh.places)
        made = rank_file(content, step, self._place.rank, ranks, run_values)
        writing = self._writing = _Writing(
            step, self._folder / folders.partial_name(step, self._run)
        )
        # A daemon: a run that ends by an error does not wait for a checkpoint.
        writing.thread = Thread(target=self._write, args=(writing, made), daemon=True)
        writing.thread.start()

    def settle(self) -> None:
        """Return when this rank has written its file: from now on its tensors may change."""
        if self._writing is not None and self._writing.thread is not None:
            self._writing.thread.join()

    def agree(self, asked: bool = False) -> bool:
        """Finish a checkpoint that all ranks have written.

        All ranks call it once a step, after `settle`. If a rank could not write its part, the
        checkpoint is removed, a line tells the user, and the run goes on.

        Args:
            asked: whether this rank was asked to save (`launch.asked`).

        Returns:
            Whether any rank was asked to save.
        """
        writing, self._writing = self._writing, None
        failed = writing is not None and writing.error is not None
        any_asked, any_failed = self._any(asked, failed)
        if writing is None:
            return any_asked
        if any_failed:
            errors = enumerate(self._everyone(writing.error))
            self._failed = next(f"rank {rank}: {error}" for rank, error in errors if error)
        else:
            self._failed = self._from_first(lambda: self._commit(writing))
        if self._failed is not None:
            self._failed = f"the checkpoint of step {writing.step} was not written: {self._failed}"
            if self._place.rank == 0:
                folders.remove(writing.partial)
                newest = folders.checkpoints_in(self._folder)
                has = f"{newest[0][1].name} is the newest" if newest else "there is none so far"
                self._say(f"{self._failed}; {has}")
        return any_asked

    def close(self) -> None:
        """Finish the checkpoint that is being written; every rank calls it.

        Raises:
            CheckpointError: the run's last checkpoint could not be written.
        """
        self.settle()
        if self._writing is not None:
            self.agree()
        if self._failed is not None:
            raise CheckpointError(self._failed, hint="is there room, and may you write there?")

    def _write(self, writing: _Writing, made: RankFile) -> None:
        """Write this rank's part of a checkpoint; runs in a thread of its own."""
        try:
            writing.partial.mkdir(parents=True, exist_ok=True)
            if self._place.rank == 0:
                self._plan.save(writing.partial / folders.PLAN)
            write(writing.partial, made)
        except (AutopipeError, OSError) as error:
            writing.error = _described(error, self._folder)

    def _commit(self, writing: _Writing) -> str | None:
        """On rank 0, finish a checkpoint that all ranks have written; returns what went wrong."""
        newest = folders.checkpoints_in(self._folder)
        if newest and newest[0][0] > writing.step:
            return f"{newest[0][1]} is of a later step, so of another run: take another folder"
        self._tell_of_others({step for step, _ in newest})
        try:
            Stored.open(writing.partial)  # nodes with disks of their own lack each other's files
            folders.commit(writing.partial, self._keep)
        except (AutopipeError, OSError) as error:
            return _described(error)
        self._seen = {step for step, _ in folders.checkpoints_in(self._folder)}
        return None

    def _tell_of_others(self, steps: set[int]) -> None:
        """Say of checkpoints that have come into the folder since this run's last one.

        Two runs that are equally quick would take turns there: a later run would go on from the
        weights of either.
        """
        others = steps - self._seen if self._seen is not None else set()
        if others:
            self._say(
                f"{self._folder / folders.step_name(max(others))} is of another run, which saves "
                "there at the same time: give each run a folder of its own"
            )

    def _offered(self) -> list[Path]:
        """The checkpoints that may be loaded, newest first, once partial ones are dealt with."""
        if not folders.is_one(self._folder):
            recover(self._folder, self._keep)
        return folders.candidates(self._folder)

    def _from_first(self, make: Callable[[], Made]) -> Made:
        return from_first(make, self._place.rank, self._world)

    def _everyone(self, mine: Made) -> list[Made]:
        """The values of all ranks, by rank; every rank gets them."""
        if self._world is None:
            return [mine]
        found: list[Any] = [None] * len(self._plan.mesh.places)
        dist.all_gather_object(found, mine, group=self._world)
        return found

    def _any(self, *mine: bool) -> tuple[bool, ...]:
        """For each flag, whether it is true on any rank."""
        if self._world is None:
            return mine
        found = torch.tensor(mine, dtype=torch.uint8)
        found = found.cuda() if "nccl" in dist.get_backend(self._world) else found
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._world)
        return tuple(map(bool, found.tolist()))


def recover(folder: Path, keep: int) -> None:
    """Finish or remove the partial folders of earlier runs; one rank calls it, before any saves."""
    for left in folders.partials(folder):
        whole = left.with_name(left.name.partition(".")[0])
        if not whole.exists() and _is_complete(left):
            folders.commit(left, keep)
        else:
            folders.remove(left)


def _is_complete(left: Path) -> bool:
    """Whether all ranks' files are there: each wrote its manifest last."""
    try:
        Stored.open(left)
    except CheckpointError:
        return False
    return True


def from_first(make: Callable[[], Made], rank: int, world: dist.ProcessGroup | None) -> Made:
    """Send a value that rank 0 makes to all ranks; all call it, each with its own rank.

    Args:
        make: returns the value; called on rank 0 alone.
    """
    if world is None:
        return make()
    made: list[Any] = [make() if rank == 0 else None]
    dist.broadcast_object_list(made, group=world)
    found: Made = made[0]
    return found


def _opened(path: Path, content: Content) -> Stored:
    """A checkpoint that fits a rank's tensors, optimizer and schedule, of which none is changed."""
    stored = Stored.open(path)
    check_stored(content, stored)
    return stored


def _described(error: Exception, folder: Path | None = None) -> str:
    """An error as the first part of a sentence; it names `folder` if the system names no file."""
    if isinstance(error, OSError):
        where = error.filename or folder
        return f"{where}: {error.strerror}" if where else f"{error.strerror}"
    return getattr(error, "message", str(error))
