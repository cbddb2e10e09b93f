"""When a training run saves, and where it goes on: the loop asks before and after each update.

    every N steps, when a signal asks for it, and at the end     save
    --resume                                                     the newest checkpoint that is whole

Beside the states of the pipe, the optimizer and the schedule, the loop's checkpoint has the
position in the batches and the random states: the losses after it are those of a run that never
stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from autopipe.errors import CheckpointError
from autopipe.runtime.attributes import Attributes
from autopipe.runtime.checkpoint.checkpoints import KEEP
from autopipe.runtime.checkpoint.content import check
from autopipe.runtime.checkpoint.plain import fence
from autopipe.runtime.feed import Feed
from autopipe.runtime.launch import asked
from autopipe.runtime.step.pipe import Pipe


@dataclass(frozen=True)
class Keeping:
    """The options about checkpoints.

    Attributes:
        folder: the folder of the checkpoints.
        every: steps between two of them; None: only at the end and when a signal asks for one.
        keep: how many of them stay.
        resume: whether to go on from the newest one, if there is one.
        seed: the seed asked for, which has to be that of the resumed run; None: any.
    """

    folder: Path
    every: int | None = None
    keep: int = KEEP
    resume: bool = False
    seed: int | None = None


class Keeper:
    """Saves a run, every rank alike; without `saving` it does nothing.

    Attributes:
        stopped: the signal by which some rank was asked to stop, and after how many steps.
    """

    def __init__(
        self,
        pipe: Pipe,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        feed: Feed,
        saving: Keeping | None,
        say: Callable[[str], None],
    ) -> None:
        self.stopped: str | None = None
        self._pipe, self._feed, self._saving = pipe, feed, saving
        self._optimizer, self._scheduler = optimizer, scheduler
        self._say = say if pipe.place.rank == 0 else lambda line: None
        self._saved = 0
        self._attributes, self._checked = Attributes(optimizer), False
        if saving is not None:
            self._checkpoints = pipe.checkpoints(saving.folder, saving.keep, say)
            self._saved = self._resume(saving) if saving.resume else 0

    def before_update(self) -> None:
        """Wait for a write that reads the tensors which the optimizer is about to change."""
        if self._saving is not None:
            self._checkpoints.settle()

    def after_step(self) -> bool:
        """Save after a step if it is time to; returns whether the run is to stop here.

        Raises:
            CheckpointError: a checkpoint cannot hold what the optimizer or the schedule keeps. The
                first step tells, long before the first checkpoint.
        """
        if self._saving is None:
            return False
        self._attributes.check()
        if not self._checked:
            check(self._pipe.content(self._optimizer, self._scheduler))
            self._checked = True
        found = self._checkpoints.agree(asked.by() is not None)
        if found:
            self.stopped = asked.by() or "another rank's signal"
        if self._saving.every is not None and self._pipe.steps % self._saving.every == 0:
            self._begin()
        return found

    def close(self) -> None:
        """End the run: save the last step, if it has not been saved.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        if self._saving is None:
            return
        if self._saved != self._pipe.steps:
            self._checkpoints.settle()
            self._checkpoints.agree()
            self._begin()
        self._checkpoints.close()
        if self.stopped is not None:
            self._say(
                f"{self.stopped}: saved and stopped after step {self._pipe.steps}; "
                "the same command with --resume goes on"
            )

    def _begin(self) -> None:
        content = self._pipe.content(self._optimizer, self._scheduler)
        values: dict[str, Any] = {**self._pipe.values(), "position": self._feed.position()}
        values["attributes"] = self._attributes.changed()
        self._checkpoints.begin(content, self._pipe.steps, values)
        self._saved = self._pipe.steps

    def _resume(self, saving: Keeping) -> int:
        """Load the newest checkpoint, if there is one; returns how many steps it is of.

        Raises:
            CheckpointError: another seed is asked for than the run began with.
        """
        loaded = self._checkpoints.load(self._pipe.content(self._optimizer, self._scheduler))
        if loaded is None:
            folder = saving.folder
            self._say(f"--resume: {folder} has no checkpoint yet, so the run begins at step 1")
            return 0
        self._pipe.resume(loaded)
        if saving.seed not in (None, self._pipe.seed):
            raise CheckpointError(
                f"--seed {saving.seed}: the run of {loaded.folder} began with --seed "
                f"{self._pipe.seed}, and its batches and dropout go on with that",
                hint="--resume without --seed; or begin anew in another folder",
            )
        with fence(f"{loaded.folder}: the optimizer's attributes"):
            self._attributes.restore(loaded.values.get("attributes", {}))
        self._say(f"goes on from {loaded.folder}, after step {loaded.step}")
        if "position" in loaded.values:
            self._feed.go_to(loaded.values["position"])
        else:
            self._feed.steps_before = loaded.step
            self._say(
                f"{loaded.folder} was saved by a script's pipe.save, which knows no batches: the "
                "run begins with the first"
            )
        return loaded.step
