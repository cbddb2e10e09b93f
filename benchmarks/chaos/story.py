"""One run of four ranks of which one comes to harm, seen from outside: what is said, and when.

    harm ---> the line that names it ---> no rank and no sidecar is left ---> the launcher ends
              told                        ended                               closed       seconds

Processes are known by what they inherit: the name of the run's folder in their environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from autopipe.schedules.instructions import Instruction, parse
from autopipe.schedules.phrases import describe
from benchmarks.chaos.harm import VARIABLE, Harm

SIZE = 4

ROOT = Path(__file__).parent.parent.parent

LIMIT = 300.0
"""Seconds after which a run counts as hanging."""

_STEPS = "500"  # more than there is time for
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE))
_RUN = ("-m", "autopipe", "run", "{plan}", "--steps", _STEPS)
_SCRIPT = (str(Path(__file__).parent / "train.py"), "{plan}", _STEPS)

LAUNCHERS = {
    "local": (*_RUN, "--local", str(SIZE)),
    "torchrun": (*_TORCHRUN, *_RUN),
    "torchrun, script": (*_TORCHRUN, *_SCRIPT),
    "alone": _RUN,
    "alone, script": _SCRIPT,
}
"""What is started. "alone": every rank by itself, as srun does; nobody but the watchdog ends it."""

_LAUNCHED = re.compile(r"RANK|WORLD_SIZE|LOCAL_|GROUP_|MASTER_|SLURM_|TORCHELASTIC_|OMP_")


@dataclass
class Story:
    """What became of a run.

    Attributes:
        instruction: where the rank came to harm.
        codes: of every rank where there is no launcher; otherwise the launcher's alone.
        lines: what was said, each line with its seconds after the harm.
    """

    harm: Harm
    instruction: Instruction
    codes: list[int]
    lines: list[tuple[float, str]]
    ended: float
    closed: float

    @property
    def place(self) -> str:
        """`rank 2 (stage 1) died at step 3, forward of micro-batch 5`, as a user has to read it."""
        verb = {"kill": "died", "stop": "froze", "raise": "failed"}[self.harm.event]
        who = f"rank {self.harm.rank} (stage {self.instruction.stage})"
        return f"{who} {verb} at step {self.harm.step}, {describe(self.instruction)}"

    def said(self, words: str) -> bool:
        """Whether a line has these words."""
        return any(words in line for _, line in self.lines)

    @property
    def told(self) -> list[float]:
        """When the rank that came to harm was named; a peer that says why it ends is not meant."""
        why = {
            "kill": ": killed (its process is gone)",
            "stop": ": stopped for 5 s (SIGSTOP)",
            "raise": ": ZeroDivisionError: in the loss",
        }[self.harm.event]
        # What a script does not catch Python prints: the error, and below it where that was.
        sentences = {f"error: {self.place}{why}", f"[rank{self.harm.rank}]: {self.place}"}
        return [seconds for seconds, line in self.lines if line in sentences]


def begin(
    argv: list[str], environ: dict[str, str], folder: str, out: int, err: int
) -> subprocess.Popen[bytes]:
    """A Python that leads a session."""
    return subprocess.Popen(
        [sys.executable, *argv],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )


def tell(plan: Path, launcher: str, harm: Harm, begin: Callable[..., Any] = begin) -> Story:
    """Run a plan until all of it has ended, which is a rank's harm sooner or later.

    Args:
        begin: how each process is started.

    Raises:
        TimeoutError: something of it runs on, or no rank came to harm; with all that was said.
        subprocess.TimeoutExpired: only the launcher runs on.
    """
    argv = [part.format(plan=plan) for part in LAUNCHERS[launcher]]
    environs = list(_environments(launcher, harm))
    launched = len(environs) == 1
    with _heard() as (writer, heard), _ending(harm.folder) as started:
        for environ in environs:
            started.append(begin(argv, environ, harm.folder, writer, writer))
        os.close(writer)
        own = {process.pid for process in started}
        outside = own if launched else set()
        mark, deadline = Path(harm.folder, "harm"), time.monotonic() + LIMIT
        while not mark.exists() or (own | running(harm.folder)) - outside:
            own = {process.pid for process in started if process.poll() is None}
            late, over = time.monotonic() > deadline, not own
            if late or (over and not mark.exists()):
                said = "\n".join(line for _, line in heard)
                what = "runs on" if late else "ended without it"
                raise TimeoutError(f"{harm}: {what}: {running(harm.folder)}\n{said}")
            time.sleep(0.03)
        ended = time.monotonic()
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in started]
        closed = time.monotonic()
    moment, _, instruction = mark.read_text().partition(" ")
    lines = [(seconds - float(moment), line) for seconds, line in heard]
    times = ended - float(moment), closed - float(moment)
    return Story(harm, parse(instruction), codes, lines, *times)


def running(run: str) -> set[int]:
    """The processes that have inherited a run's folder; those that have ended are left out."""
    token = json.dumps(run)  # in quotes, or folder 1 would have the processes of folder 10
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if token.encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
    return found


@contextmanager
def _heard() -> Iterator[tuple[int, list[tuple[float, str]]]]:
    """Where to write, and every line that was written with the time that it came at."""
    reader, writer = os.pipe()
    heard: list[tuple[float, str]] = []

    def listen() -> None:
        with os.fdopen(reader, errors="replace") as file:
            for line in file:
                heard.append((time.monotonic(), line.rstrip("\n")))

    thread = Thread(target=listen)
    thread.start()
    yield writer, heard
    thread.join()  # until nobody is left who could write


@contextmanager
def _ending(run: str) -> Iterator[list[Any]]:
    """A list for the processes started in the block; nothing outlives it."""
    started: list[Any] = []
    try:
        yield started
    finally:
        for pid in running(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in started:
            process.kill()
            process.wait()


def _environments(launcher: str, harm: Harm) -> Iterator[dict[str, str]]:
    """Of each process to start: one launcher, or every rank."""
    clean = {name: value for name, value in os.environ.items() if not _LAUNCHED.match(name)}
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    clean |= {VARIABLE: json.dumps(harm._asdict())}
    if not launcher.startswith("alone"):
        yield clean
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    clean |= {"WORLD_SIZE": str(SIZE), "LOCAL_WORLD_SIZE": str(SIZE), "GROUP_RANK": "0"}
    clean |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for rank in range(SIZE):
        yield {**clean, "RANK": str(rank), "LOCAL_RANK": str(rank)}
