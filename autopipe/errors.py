"""The errors that autopipe raises, as one tree of classes.

    AutopipeError                    a sentence, and the hint below it
    +-- ModelError                   the model file, its inputs or its batch
    |   +-- CaptureError             the model cannot be captured as a graph
    |       +-- Uncaptured           a call in it cannot, which may run as it is
    +-- PlanError                    a plan file that cannot be read, or is of something else
    +-- InfeasibleError              no plan fits what was asked
    +-- ScheduleError                a program that cannot run: a deadlock, a missing transfer
    +-- LaunchError                  the processes are not the ones the plan was made for
    +-- CheckpointError              a checkpoint that cannot be written, or not be used
        +-- DamagedError             what is on the disk is not what was written

Each message states what was asked, what was found and where; `hint` states what to try next. The
command line prints both and exits with code 2: the user can fix these errors, they are no bugs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType


class AutopipeError(Exception):
    """The base class: `except autopipe.AutopipeError` catches every error that a user can fix.

    Args:
        message: one sentence: what was asked, what was found, the place; without the `: ` after a
            place that is not known.
        hint: what to try next; printed on its own line after `hint:`.

    >>> place = ""
    >>> print(AutopipeError(f"{place}: no graph has this", hint="write it with ops of torch"))
    no graph has this
    hint: write it with ops of torch
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = message.removeprefix(": ")
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class ModelError(AutopipeError):
    """The model file, the inputs or the batch is not what a step needs."""


class CaptureError(ModelError):
    """`torch.export` cannot capture the model; the message names the user's own line."""


class Uncaptured(CaptureError):
    """`torch.export` cannot capture a call of the model's code that itself runs well.

    Args:
        frames: those on the stack at that place, each with its line then, if it was not where the
            error is raised.
        module: the path of the module whose call it is, if no frame is known.
        whole: whether the model's own forward may run as it is for it. Nothing of the model is cut
            then, so only for what cannot be written otherwise.
        lines: whether some lines around the place may run as they are for it: not for what has an
            effect on what comes after them.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        frames: Sequence[tuple[FrameType, int]] = (),
        module: str = "",
        whole: bool = False,
        lines: bool = False,
    ) -> None:
        super().__init__(message, hint=hint)
        self.frames = frames
        self.module = module
        self.whole = whole
        self.lines = lines


class SizesByValues(Uncaptured):
    """A tensor has a size that depends on the values of another one."""


class OtherBranch(Uncaptured):
    """Other rows of the user's take another branch of the model than the ones it is traced with."""


class LaterBranch(Uncaptured):
    """A later call of the model reads another value: a buffer counts calls, or an update has moved
    weights."""


class DrawnBranch(Uncaptured):
    """Random numbers of torch's decide which branch Python takes."""


class OtherCalls(CaptureError):
    """A second call of the model on the same rows makes other calls of torch."""


class RowsFixed(Uncaptured):
    """A trace holds for some numbers of rows alone."""


MEND_PLAN = "mend that place in the plan file, or make the plan again with `autopipe plan`"
"""The hint of an error that names a place in a plan."""


class PlanError(AutopipeError):
    """A plan file is truncated, of another format, of another model, or contradicts itself.

    A message that begins with a place in the plan has a hint in any case.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        if hint is None and message.startswith("plan."):
            hint = MEND_PLAN
        super().__init__(message, hint=hint)


class InfeasibleError(AutopipeError):
    """No plan fits the devices; the message names the nearest plan and the missing bytes.

    Args:
        shortfall: the missing bytes of device memory; 0 if memory is not the reason.
    """

    def __init__(self, message: str, *, hint: str | None = None, shortfall: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.shortfall = shortfall


class ScheduleError(AutopipeError):
    """The ranks' programs of a schedule cannot run to their end."""


class LaunchError(AutopipeError):
    """The running processes do not match the ranks and devices of the plan."""


class CheckpointError(AutopipeError):
    """A checkpoint cannot be written, or is not one of this model and optimizer."""


class DamagedError(CheckpointError):
    """What is on the disk is not what was written: cut short, changed, or a part is missing."""
