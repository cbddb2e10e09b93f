"""Harm one rank of a run at one instruction, from within; an environment variable says which
rank and instruction.

    AUTOPIPE_CHAOS='{"rank": 2, "step": 3, "kind": "WAIT", "event": "kill", "folder": "/tmp/x"}'

The rank comes to harm as the instruction begins, where the product itself would: after it has noted
that it is there, and before anything of it is done. When that was, and at which instruction, it
leaves in the folder, as `harm`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from autopipe.runtime.step.executor import Executor
from autopipe.runtime.step.stage import StepInput
from autopipe.schedules.instructions import Kind, Program

VARIABLE = "AUTOPIPE_CHAOS"


class Harm(NamedTuple):
    """What is to happen: `event` to `rank` at an instruction of `kind` of step `step`."""

    rank: int
    step: int
    kind: str
    event: str
    folder: str


def fail() -> None:
    """What a bug in a loss, a full disk or a lack of memory does."""
    raise ZeroDivisionError("in the loss")


EVENTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": fail,
}


def chosen(program: Program, kind: Kind) -> int:
    """The position of the instruction in the middle of all those of `kind`."""
    found = [position for position, instruction in enumerate(program) if instruction.kind is kind]
    return found[len(found) // 2]


def install() -> None:
    """From here on the rank that the environment names comes to harm when it is there."""
    if VARIABLE not in os.environ:
        return
    harm = Harm(**json.loads(os.environ[VARIABLE]))
    if (os.environ.get("RANK") or os.environ.get("SLURM_PROCID")) != str(harm.rank):
        return
    run = Executor.run

    def harmed(executor: Executor, step: StepInput) -> list[tuple[Tensor, ...]]:
        _, number, _ = step.stream
        if number == harm.step:
            executor.watch = watching(executor)
        return run(executor, step)

    def watching(executor: Executor) -> Callable[[int], None]:
        watch = executor.watch
        assert watch is not None
        place = chosen(executor.program, Kind(harm.kind))

        def come_to_harm(position: int) -> None:
            watch(position)
            if position == place:
                said = f"{time.monotonic()} {executor.program[position]}"
                Path(harm.folder, "harm").write_text(said)
                EVENTS[harm.event]()

        return come_to_harm

    Executor.run = harmed  # type: ignore[method-assign, assignment]
