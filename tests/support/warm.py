"""Processes that start with torch and autopipe imported, as forks that have done nothing else.

    spawn(4, ["tests/support/pipe_worker.py", folder])   as `launch.spawn` does it; sooner
    start(["-m", "autopipe", "run", ...], environ)   one of them, as Popen starts it

To import all that a rank needs takes 3 s and more, most of what many a test would take. Here one
process does so once for all even ranks of a run of the tests, and another for all odd ones
(`_serve`). What is started is a fork of it: a process in its own right, which leads a session, has
an exit code, and is killed, stopped and watched as any.

    a test --------+-- parent of even ranks --+-- rank 0 --- its sidecar
                   |                          +-- rank 2 --- its sidecar
    another one ---+-- parent of odd ranks ---+-- rank 1 ...

Two parents, since each has a seed of its own for the hashes of strings: ranks that go through a set
in the order of its hashes differ here too, as they do for a user.

Nobody but the forks computes: a parent has one thread, or it does not fork. The first process of
pytest that asks for a parent starts it, the others find its socket in the folder of `traces`; it
ends when nobody is left to ask.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from autopipe.runtime.launch import spawn as cold
from tests.support import garbage
from tests.support.traces import FOLDER

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
    """A `_serve`; what it has forked for this process ends with this process.

    Args:
        place: of its socket. Where nobody listens there, a parent is started.
    """

    def __init__(self, place: Path) -> None:
        self._lock = threading.Lock()
        self._own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None
        with _alone(place):
            try:
                self._own.connect(str(place))
            except (FileNotFoundError, ConnectionRefusedError):
                self._process = _started(place)
                self._own.connect(str(place))
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # others may still ask it
            self._process = None


def _started(place: Path) -> subprocess.Popen[bytes]:
    """A parent that listens: who connects before it is ready waits for the first answer."""
    place.unlink(missing_ok=True)
    own = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random", "OMP_NUM_THREADS": "1"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(place))
        door.listen()
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm", str(door.fileno()), str(place)],
            cwd=ROOT,
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            pass_fds=[door.fileno()],
        )


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Within, no other process begins or ends a parent of this place."""
    with place.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _parent(odd: bool) -> _Parent:
    folder = os.environ.get(FOLDER) or tempfile.mkdtemp(prefix="autopipe-parents-")
    return _Parent(Path(folder, "odd" if odd else "even"))


# The parent, and what becomes of it in a fork


def _serve(door: socket.socket, place: Path) -> list[str]:
    """Fork for each request; in the fork, return what is to be run. The parent never returns."""
    asking: dict[socket.socket, set[int]] = {}
    """Who asks, each with its forks."""
    while True:
        for control in select.select([door, *asking], [], [])[0]:
            if control is door:
                asking[door.accept()[0]] = set()
            elif (argv := _answered(control, asking, door)) is not None:
                return argv
        if not asking:
            _leave(door, place)


def _leave(door: socket.socket, place: Path) -> None:
    """End, unless somebody has come to the door meanwhile."""
    try:
        with _alone(place):
            if not select.select([door], [], [], 0)[0]:
                place.unlink(missing_ok=True)
                os._exit(0)
    except FileNotFoundError:  # the run of the tests is over, and its folder is gone
        os._exit(0)


def _answered(
    control: socket.socket, asking: dict[socket.socket, set[int]], door: socket.socket
) -> list[str] | None:
    """Answer a request. In a fork that was asked for: what is to be run."""
    said, files, _, _ = socket.recv_fds(control, _MOST, 2)
    children = asking[control]
    if not said:
        for pid in children:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        del asking[control]
        control.close()
        return None
    request = json.loads(said)
    if "poll" in request:
        pid, status = os.waitpid(request["poll"], os.WNOHANG)
        children.discard(pid)
        code = os.waitstatus_to_exitcode(status) if pid else None
        control.send(json.dumps(code).encode())
        return None
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        os.setsid()  # before anybody knows its number, and may end the group
        control.send(json.dumps(os.getpid()).encode())
        for other in (door, *asking):
            other.close()
        _begin(parent, files, request["environ"], request["folder"])
        argv: list[str] = request["argv"]
        return argv
    for file in files:
        os.close(file)
    children.add(pid)
    return None


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


def _main(door: int, place: Path) -> NoReturn:
    for name in LOADED:
        import_module(name)
    gc.collect()
    garbage.rarely()
    code = 0
    try:
        _run(_serve(socket.socket(fileno=door), place))
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
    _main(int(sys.argv[1]), Path(sys.argv[2]))
