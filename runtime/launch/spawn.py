"""Starts and ends the processes of `--local N` on this machine.

    parent --+-- rank 0 --+-- its sidecar, its data loaders     a session of their own: one group,
             +-- rank 1 --+-- ...                               ended as a whole

torch is not imported here: the parent that waits for its children has no use for it.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from autopipe.errors import LaunchError
from autopipe.runtime.launch.asked import HEARD
from autopipe.runtime.launch.logs import UNBUFFERED, Logs


def cores() -> int:
    """How many cores this process may use: what Slurm or a container has left of the machine."""
    every = os.cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every


GRACE = 5.0
"""Seconds between asking a process to end (SIGTERM) and ending it (SIGKILL)."""


def spawn(
    processes: int,
    argv: Sequence[str],
    command: Sequence[str] = (sys.executable, "-m", "autopipe"),
    environs: Sequence[Mapping[str, str]] | None = None,
    *,
    forwarded: Sequence[signal.Signals] = (),
    log_dir: Path | None = None,
) -> int:
    """Run `command` with `argv` in so many processes on this machine: what `--local N` does.

    Args:
        environs: torchrun's variables for each of them, where there are ranks on other machines
            too; by themselves otherwise.

    They find torchrun's variables in their environment and write to the same stdout and stderr.
    All of them end when one fails, on Ctrl-C or on SIGTERM: none outlives this function.

    Each leads a session of its own: Ctrl-C reaches the parent alone, which then ends each of them
    with what that one has started in turn (data loaders). A parent that is itself killed cannot do
    so; on Linux the kernel then does. Call it from the main thread, where signals arrive.

    Args:
        forwarded: signals that do not end this function: each process gets them, and ends itself;
            a second SIGINT ends it all the same.
        log_dir: a folder for what each rank prints, on stdout and stderr, beside the terminal.

    Returns:
        0, or the code of the first process that failed; 128 + n if signal n killed it, or stopped
        this function; 130 if all have ended well after a SIGINT.

    Raises:
        LaunchError: fewer than one process is asked for, or the logs cannot be written.
    """
    if processes < 1:
        raise LaunchError(f"expected at least 1 local process, found {processes}")
    # A program of its own, not Popen's `preexec_fn`: that one is unsafe in a parent with threads.
    guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
    if sys.platform != "linux":
        guard = []
    logs = Logs(log_dir) if log_dir is not None else None
    with _signals({signal.SIGINT, signal.SIGTERM, *forwarded}) as received:
        children: list[subprocess.Popen[bytes]] = []
        kept, interrupted = {*forwarded}, 0
        try:
            for environ in _environments(processes, environs):
                full = [*guard, *command, *argv]
                children.append(_start(full, environ, logs))
            while not (ending := [number for number in received if number not in kept]):
                for number in [*received]:
                    received.remove(number)
                    for child in children:
                        child.send_signal(number)
                    if number == signal.SIGINT:
                        kept.discard(signal.SIGINT)
                        interrupted = 128 + number
                        print(HEARD, file=sys.stderr)
                codes = [child.poll() for child in children]
                failed = [
                    (code == -signal.SIGTERM, code, rank) for rank, code in enumerate(codes) if code
                ]
                if failed:
                    # The peers of a killed process fail too, a moment later, or are ended by their
                    # sidecars: name the cause.
                    _, code, rank = min(failed)
                    how = f"exited with code {code}"
                    if code < 0:
                        how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
                    print(f"rank {rank} of {processes} {how}; ending the others", file=sys.stderr)
                    return code if code > 0 else 128 - code
                if None not in codes:
                    return interrupted
                time.sleep(0.05)
            return 128 + ending[0]
        finally:
            _end(children)
            if logs is not None:
                logs.close()


def _start(
    command: Sequence[str], environ: Mapping[str, str], logs: Logs | None
) -> subprocess.Popen[bytes]:
    """A process in a session of its own; `logs` get what it prints."""
    pipe = subprocess.PIPE if logs is not None else None
    full = {**environ, **UNBUFFERED} if logs is not None else environ
    child = subprocess.Popen(command, env=full, start_new_session=True, stdout=pipe, stderr=pipe)
    if logs is not None:
        logs.follow(environ["RANK"], child)
    return child


def free_port() -> int:
    """A port of this machine that nobody listens on.

    Below those that Linux gives to connections by itself (from 32768 on): until rank 0 listens, one
    of them could be given to any. Whoever has seeded `random` alike gets another one all the same.
    """
    draw = random.SystemRandom()
    while True:
        with suppress(OSError):
            with socket.create_server(("127.0.0.1", draw.randrange(20000, 32768))) as server:
                return int(server.getsockname()[1])


def _environments(
    processes: int, variables: Sequence[Mapping[str, str]] | None = None
) -> Iterator[dict[str, str]]:
    """The whole environment of each process; `variables` are torchrun's."""
    # An agent of torchrun's that started the parent knows nothing of these processes.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    threads = {"OMP_NUM_THREADS": str(max(1, cores() // processes))}
    for own in variables or _alone(processes):
        yield {**threads, **inherited, **own}


def _alone(processes: int) -> list[dict[str, str]]:
    """Torchrun's variables of so many processes that are all there are."""
    port = free_port()
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(processes),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(processes)
    ]


_GUARD = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1  # linux/prctl.h; outlives exec
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):  # otherwise the parent was gone before the line above
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the children's groups: also what a child that is gone has left behind."""
    deadline = time.monotonic() + GRACE
    for number in (signal.SIGTERM, signal.SIGKILL):
        for group in _groups(children):
            with suppress(ProcessLookupError):
                os.killpg(group, number)
                os.killpg(group, signal.SIGCONT)  # a stopped process keeps the other for later
        while time.monotonic() < deadline and _groups(children):
            time.sleep(0.01)
    for child in children:
        child.wait()


def _groups(children: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """The process groups of the children that somebody still runs in."""
    running = {child.pid for child in children if child.poll() is None}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, group, session, *_ = entry.read_text().rpartition(")")[2].split()
            if group == session and state != "Z":  # not a later group that has the same number
                running.add(int(group))
    return [child.pid for child in children if child.pid in running]


@contextmanager
def _signals(numbers: Collection[signal.Signals]) -> Iterator[list[int]]:
    """Note these signals, in the order they come in, instead of dying of them."""
    received: list[int] = []
    before = {n: signal.signal(n, lambda number, _: received.append(number)) for n in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
