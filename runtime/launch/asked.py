"""Whether this process was asked to save and stop: by SIGUSR1 or SIGTERM, as schedulers send them.

Slurm sends SIGTERM before it preempts a job and what `--signal` names before its time is up;
Kubernetes and torchrun send SIGTERM. The training loop looks after each step.
"""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

_received: list[int] = []


def listen() -> None:
    """From here on these signals do not end the process; call it from the main thread."""
    for number in SIGNALS:
        signal.signal(number, _note)


def by() -> str | None:
    """The name of the first signal that has come; None: none has."""
    return signal.Signals(_received[0]).name if _received else None


def _note(number: int, frame: FrameType | None) -> None:
    _received.append(number)
