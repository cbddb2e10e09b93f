"""Processes that begin with torch and autopipe imported, and with nothing done.

    spawn(4, ["tests/support/pipe_worker.py", folder])   as `launch.spawn` does it; sooner
    start(["-m", "autopipe", "run", ...], environ)   one of them, as Popen starts it

To import all that a rank needs takes 3 s and more, most of what many a test would take. Here one
process does so once for all even ranks, and another for all odd ones (`_serve`). What is started is
a fork of it: a process in its own right, which leads a session, has an exit code, and is killed,
stopped and watched as any.

    test --- parent of even ranks --+-- rank 0 --- its sidecar
         |                          +-- rank 2 --- its sidecar
         +-- parent of odd ranks ---+-- rank 1 ...

Two parents, since each has a seed of its own for the hashes of strings: ranks that go through a set
in the order of its hashes differ here too, as they do for a user.

Nobody but the forks computes: a parent has one thread, or it does not fork.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from autopipe.runtime.launch import spawn as cold
from tests.support import garbage

ROOT = Path(__file__).parents[2]

LINUX = sys.platform == "linux"
"""Elsewhere what is started starts as everything does."""

LOADED = (
    *(
        "autopipe.cli",
        "autopipe.runtime.parallelize",
        "autopipe.planners.driver.make_plan",
        "autopipe.runtime.train",
    ),
    *("pytest", "tests.support.pipes", "torch._dynamo"),
)
"""What ranks import, and all that these import; torch loads the last with the first optimizer."""

_MOST = 1 << 17  # bytes of a request: a command line and an environment


class Process:
    """A fork, to its tests what `subprocess.Popen` is: as much of it as they use.

    Args:
        argv: a script and its arguments, or `-m`, a module and its arguments.
        environ: all of its environment; by the rank in it a parent is chosen.
        folder: that it runs in; None: where this process is.
        out, err: files for what it writes.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        folder: str | Path | None = None,
        out: int = 1,
        err: int = 2,
    ) -> None:
        rank = int(environ.get("RANK", environ.get("SLURM_PROCID", "0")))
        self._parent = _parent(odd=rank % 2 == 1)
        request = {"argv": [*argv], "environ": {**environ}, "folder": str(folder or Path.cwd())}
        self.pid: int = self._parent.ask(request, out, err)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout if timeout is not None else 1e9)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start(
    argv: Sequence[str],
    environ: Mapping[str, str],
    folder: str | Path | None = None,
    out: int = 1,
    err: int = 2,
) -> Process | subprocess.Popen[bytes]:
    """A process that leads a session; `Process` says what is what."""
    if LINUX:
        return Process(argv, environ, folder, out, err)
    return subprocess.Popen(
        [sys.executable, *argv],
        env={**environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )


def spawn(
    processes: int,
    argv: Sequence[str],
    folder: str | Path | None = None,
    out: int = 1,
    err: int = 2,
) -> int:
    """So many ranks, which find torchrun's variables: the code of the first that failed, or 0.

    All of them end when one fails.
    """
    children: list[Any] = []
    try:
        for environ in cold._environments(processes):
            children.append(start(argv, environ, folder, out, err))
        while True:
            codes = [child.poll() for child in children]
            if None not in codes or any(codes):
                return next((int(code) for code in codes if code), 0)
            time.sleep(0.01)
    finally:
        cold._end(children)


# The parent, from outside


class _Parent:
    """One `_serve`; it ends with this process, and so do its forks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.support.warm", str(other.fileno())]
        with other:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )
        atexit.register(self.close)

    def ask(self, request: Mapping[str, object], *files: int) -> Any:
        said = json.dumps(request).encode()
        with self._lock:
            socket.send_fds(self._own, [said], files)
            answer = self._own.recv(_MOST)
        assert answer, "the parent of ranks has ended"
        return json.loads(answer)

    def close(self) -> None:
        self._own.close()
        self._process.wait()


@functools.cache
def _parent(odd: bool) -> _Parent:
    return _Parent()


# The parent, and what becomes of it in a fork


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork for each request; in the fork, return what is to be run. The parent never returns."""
    children = set[int]()
    while True:
        said, files, _, _ = socket.recv_fds(control, _MOST, 2)
        if not said:
            for pid in children:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        request = json.loads(said)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            children.discard(pid)
            code = os.waitstatus_to_exitcode(status) if pid else None
            control.send(json.dumps(code).encode())
            continue
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            os.setsid()  # before anybody knows its number, and may end the group
            control.send(json.dumps(os.getpid()).encode())
            control.close()
            _begin(parent, files, request["environ"], request["folder"])
            return request["argv"]
        for file in files:
            os.close(file)
        children.add(pid)


def _begin(parent: int, files: list[int], environ: dict[str, str], folder: str) -> None:
    """Be what a process is that was started by itself."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    if os.getppid() != parent:
        os._exit(1)
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)


def _run(argv: list[str]) -> None:
    """As `python ARGV` does."""
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")


def _main(control: int) -> NoReturn:
    for name in LOADED:
        import_module(name)
    gc.collect()
    garbage.rarely()
    code = 0
    try:
        _run(_serve(socket.socket(fileno=control)))
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # As Python ends, but for taking apart what the parent has built: that takes half a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
