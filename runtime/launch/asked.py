"""Whether this process was asked to save and stop: by SIGUSR1, SIGTERM or Ctrl-C.

Slurm sends SIGTERM before it preempts a job, and the signal of `--signal` before the job's time is
up; Kubernetes and torchrun send SIGTERM; a terminal sends SIGINT on Ctrl-C. The training loop calls
`by` after each step.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

HEARD = "Ctrl-C: the run saves after this step and stops; press it again to end at once"
"""The answer to the first Ctrl-C, printed on the terminal."""

_received: list[int] = []


def listen(*, alone: bool = False) -> None:
    """From now on note `SIGNALS` instead of dying of them; a second Ctrl-C still ends the process.

    Call it from the main thread.

    Args:
        alone: whether to print `HEARD` on a Ctrl-C; else a parent process may print it.
    """

    def note(number: int, frame: FrameType | None) -> None:
        _received.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if alone:
                os.write(2, f"{HEARD}\n".encode())  # `print` may be at work already

    for number in SIGNALS:
        ignored = signal.getsignal(number) is signal.SIG_IGN
        if number != signal.SIGINT or not ignored:  # a shell ignores it for background commands
            signal.signal(number, note)


def by() -> str | None:
    """The name of the first signal that this process has received; None: it has received none."""
    if not _received:
        return None
    name = signal.Signals(_received[0]).name
    return f"{name} (Ctrl-C)" if interrupted() else name


def interrupted() -> bool:
    """Whether the first signal was a Ctrl-C."""
    return _received[:1] == [signal.SIGINT]
