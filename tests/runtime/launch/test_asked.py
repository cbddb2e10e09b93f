"""What a process notes when it is asked to stop, in a real process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PROGRAM = """
import os, signal, sys
from autopipe.runtime.launch import asked
asked.listen(alone=True)
for name in sys.argv[1:]:
    os.kill(os.getpid(), signal.Signals[name])
print(asked.by(), asked.interrupted())
"""


AS_IN_A_TERMINAL = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
"""For tests that themselves run in background, where a shell has Ctrl-C ignored."""


def told(*signals: str, ignoring: str = "") -> subprocess.CompletedProcess[str]:
    first = "" if ignoring else AS_IN_A_TERMINAL
    command = [sys.executable, "-c", first + PROGRAM, *signals]
    if ignoring:
        command = ["sh", "-c", f"trap '' {ignoring}; exec \"$@\"", "sh", *command]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("signals", "said"),
    [
        ((), "None False\n"),
        (("SIGUSR1",), "SIGUSR1 False\n"),
        (("SIGTERM", "SIGINT"), "SIGTERM False\n"),
        (("SIGINT", "SIGTERM", "SIGTERM"), "SIGINT (Ctrl-C) True\n"),
    ],
)
def test_the_first_one_counts(signals: tuple[str, ...], said: str) -> None:
    done = told(*signals)
    assert (done.returncode, done.stdout) == (0, said)
    assert ("Ctrl-C: the run saves after this step" in done.stderr) == ("SIGINT" in signals)


def test_a_second_ctrl_c_does_not_wait() -> None:
    assert told("SIGINT", "SIGINT").stderr.endswith("KeyboardInterrupt\n")


def test_what_was_ignored_before() -> None:
    """USR1 is ignored until a rank listens; Ctrl-C is not for what a shell runs in background."""
    assert told("SIGUSR1", ignoring="USR1").stdout == "SIGUSR1 False\n"
    assert told("SIGINT", ignoring="INT").stdout == "None False\n"
