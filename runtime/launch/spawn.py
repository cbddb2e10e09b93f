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
    """The number of cores that this process may use; Slurm or a container may withhold some."""
    every = os.cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every


GRACE = 5.0
"""Seconds between asking a process to end (SIGTERM) and ending it (SIGKILL)."""


def spawn(
    processes: int,
    argv: Sequence[str],
    command: Sequence[str] | None = None,
    environs: Sequence[Mapping[str, str]] | None = None,
    *,
    forwarded: Sequence[signal.Signals] = (),
    log_dir: Path | None = None,
) -> int:
    """Run a command in several processes on this machine, as `--local N` does.

    The processes find torchrun's variables in their environment, and share this process's stdout
    and stderr. All of them end when one fails, on Ctrl-C or on SIGTERM: none outlives this call.

    Each process leads a session of its own. So Ctrl-C reaches the parent alone, which then ends
    each process together with whatever the process has started (data loaders). If the parent is
    killed, the kernel ends the processes (on Linux only). Call it from the main thread, where
    signals arrive.

    Args:
        processes: how many to start.
        argv: arguments that follow `command`.
        command: the program and its first arguments; None: autopipe.
        environs: torchrun's variables of each process, if the run has ranks on other machines;
            None: these processes are all ranks.
        forwarded: signals that do not end this call: it sends them on to the processes, which then
            end by themselves. A second SIGINT ends the call all the same.
        log_dir: a folder for a log of each rank's output, which the terminal shows as well.

    Returns:
        0, or the exit code of the first process that failed; 128 + n if signal n killed that
        process or ended this call; 130 if all processes succeeded after a SIGINT.

    Raises:
        LaunchError: `processes` is less than 1, or the logs cannot be written.
    """
    if processes < 1:
        raise LaunchError(f"expected at least 1 local process, found {processes}")
    # A program, not Popen's `preexec_fn`, which is unsafe in a parent with threads.
    guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
    if sys.platform != "linux":
        guard = []
    logs = Logs(log_dir) if log_dir is not None else None
    with _signals({signal.SIGINT, signal.SIGTERM, *forwarded}) as received:
        children: list[subprocess.Popen[bytes]] = []
        try:
            for environ in _environments(processes, environs):
                full = [*guard, *(command or _autopipe()), *argv]
                children.append(_start(full, environ, logs))
            return _waited(children, received, {*forwarded})
        finally:
            _end(children)
            if logs is not None:
                logs.close()


def _autopipe() -> list[str]:
    """The command that starts autopipe, with the folders of modules of this process.

    The program `autopipe` finds no modules in the current folder, where a user's `queue.py` may
    stand; `python -m` does, unless it is told not to.
    """
    main = sys.modules["__main__"]
    script = getattr(main, "__spec__", None) is None and hasattr(main, "__file__")
    return [sys.executable, *(["-P"] if script else []), "-m", "autopipe"]


def _waited(
    children: Sequence[subprocess.Popen[bytes]], received: list[int], passed_on: set[int]
) -> int:
    """Wait until all children have ended, one has failed, or a signal ends the call.

    Args:
        received: the signals that this process gets; they are taken out as they are passed on.
        passed_on: signals that children get. SIGINT is taken out of it by the first one: a second
            SIGINT ends the call.

    Returns:
        The exit code, as `spawn` has it.
    """
    interrupted = 0
    while not (ending := [number for number in received if number not in passed_on]):
        for number in [*received]:
            received.remove(number)
            for child in children:
                child.send_signal(number)
            if number == signal.SIGINT:
                passed_on.discard(signal.SIGINT)
                interrupted = 128 + number
                print(HEARD, file=sys.stderr)
        codes = [child.poll() for child in children]
        if any(codes):
            return _failure(codes)
        if None not in codes:
            return interrupted
        time.sleep(0.05)
    return 128 + ending[0]


def _failure(codes: Sequence[int | None]) -> int:
    """Say which rank has failed; returns the exit code of `spawn`.

    Args:
        codes: of each rank, as `Popen.poll` gives them; None: it still runs.
    """
    # The peers of a killed process fail too, a moment later, or are ended by their sidecars, by
    # SIGTERM: name the cause.
    failed = [(code == -signal.SIGTERM, code, rank) for rank, code in enumerate(codes) if code]
    _, code, rank = min(failed)
    ended = f"exited with code {code}"
    if code < 0:
        ended = f"was killed by signal {-code} ({signal.strsignal(-code)})"
    print(f"rank {rank} of {len(codes)} {ended}; ending the others", file=sys.stderr)
    return code if code > 0 else 128 - code


def _start(
    command: Sequence[str], environ: Mapping[str, str], logs: Logs | None
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; `logs` copy its output."""
    pipe = subprocess.PIPE if logs is not None else None
    full = {**environ, **UNBUFFERED} if logs is not None else environ
    child = subprocess.Popen(command, env=full, start_new_session=True, stdout=pipe, stderr=pipe)
    if logs is not None:
        logs.follow(environ["RANK"], child)
    return child


def free_port() -> int:
    """A TCP port of this machine on which no process listens.

    It is below 32768, where Linux begins to assign ports to connections by itself, so that it stays
    free until rank 0 listens. The draw does not depend on the seed of `random`: two runs that seed
    it alike get different ports.
    """
    draw = random.SystemRandom()
    while True:
        with suppress(OSError):
            with socket.create_server(("127.0.0.1", draw.randrange(20000, 32768))) as server:
                return int(server.getsockname()[1])


def _environments(
    processes: int, variables: Sequence[Mapping[str, str]] | None = None
) -> Iterator[dict[str, str]]:
    """The whole environment of each process; `variables` are torchrun's, as `spawn.environs`."""
    # They are not workers of the torchrun agent that may have started the parent.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    threads = {"OMP_NUM_THREADS": str(max(1, cores() // processes))}
    for own in variables or _alone(processes):
        yield {**threads, **inherited, **own}


def _alone(processes: int) -> list[dict[str, str]]:
    """torchrun's variables for processes that are all ranks of a run."""
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
    """End the children's process groups, also those whose leader has ended already."""
    deadline = time.monotonic() + GRACE
    for number in (signal.SIGTERM, signal.SIGKILL):
        for group in _groups(children):
            with suppress(ProcessLookupError):
                os.killpg(group, number)
                os.killpg(group, signal.SIGCONT)  # a stopped process acts on SIGTERM only then
        while time.monotonic() < deadline and _groups(children):
            time.sleep(0.01)
    for child in children:
        child.wait()


def _groups(children: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """The children's process groups in which some process still runs."""
    running = {child.pid for child in children if child.poll() is None}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended meanwhile
            state, _, group, session, *_ = entry.read_text().rpartition(")")[2].split()
            if group == session and state != "Z":  # else another group that reuses the number
                running.add(int(group))
    return [child.pid for child in children if child.pid in running]


@contextmanager
def _signals(numbers: Collection[signal.Signals]) -> Iterator[list[int]]:
    """Within, collect these signals in a list, in order, instead of dying of them."""
    received: list[int] = []
    before = {n: signal.signal(n, lambda number, _: received.append(number)) for n in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
