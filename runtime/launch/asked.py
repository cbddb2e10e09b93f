"""Whether this process was asked to save and stop: by SIGUSR1, SIGTERM or Ctrl-C.

Slurm sends SIGTERM before it preempts a job and what `--signal` names before its time is up;
Kubernetes and torchrun send SIGTERM; a terminal sends SIGINT on Ctrl-C. The training loop looks
after each step.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

HEARD = "Ctrl-C: it saves after this step and stops; once more, and it ends at once"
"""What whoever sits at the terminal is told."""

_received: list[int] = []


def listen(*, alone: bool = False) -> None:
    """From here on these signals do not end the process, but for a second Ctrl-C.

    Call it from the main thread.

    Args:
        alone: nobody else answers a Ctrl-C.
    """

    def note(number: int, frame: FrameType | None) -> None:
        _received.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if alone:
                os.write(2, f"{HEARD}\n".encode())  # `print` may be at work already

    for number in SIGNALS:
        ignored = signal.getsignal(number) is signal.SIG_IGN
        if number != signal.SIGINT or not ignored:  # as a shell has it for what runs in background
            signal.signal(number, note)


def by() -> str | None:
    """The name of the first signal that has come; None: none has."""
    if not _received:
        return None
    name = signal.Signals(_received[0]).name
    return f"{name} (Ctrl-C)" if interrupted() else name


def interrupted() -> bool:
    """Whether it was Ctrl-C that came first."""
    return _received[:1] == [signal.SIGINT]
