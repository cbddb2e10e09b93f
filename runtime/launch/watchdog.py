"""A rank's side of the watchdog: it reports which step it is in, and asks which rank died first.

    with watchdog.at(7): ...             step 7
    executor.watch = watchdog.learn(program)
                                         from now on `executor.watch(i)`: I am at instruction i
    watchdog.verdict(error)              I am about to end, with this error: whose fault is it?

    rank 2 (stage 1) died at step 7, forward of micro-batch 5: killed (its process is gone)

A process beside the rank does the rest (`runtime.launch.guard`). It needs nothing of the rank
but three numbers in shared memory. Saying where one is costs a store into it.

What a rank of a run with a watchdog may count on, whatever happens to another rank: it ends, with a
code other than 0, within 2 s if that one was killed and within 15 s if it was stopped or its node
cannot be reached any longer; and the first death is named once on each node. A rank that has ended
in good order while another one needs it for a step is named too, within 15 s. Two nodes that reach
rank 0's but not each other are not noticed: there the time limit of the transport is what is left.

Needs Linux 5.4 or later (pidfd), and a process. Elsewhere a line warns, and that limit is left.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

from autopipe.runtime.launch.guard import AFTER, INSIDE, MEMORY, OUTSIDE
from autopipe.runtime.launch.messages import Message
from autopipe.runtime.launch.words import is_echo, sentence
from autopipe.schedules.instructions import Instruction
from autopipe.schedules.phrases import describe
from autopipe.util import gc_pause

WAIT = 10.0
"""Seconds that a rank waits for a verdict. More than the hub needs to reach any."""

PATIENCE = 5.0
"""Seconds for the sidecar to take a message, or to end after the goodbye of its rank."""

KEY = "autopipe/watchdog"
"""Where in the run's store the address of rank 0's sidecar is."""

LOCAL = "127.0.0.1"
"""The host to give where all ranks are on one."""

_BACKLOG = 1024  # sidecars that may knock before rank 0's is there

# Neither torch nor site-packages: all that a sidecar imports is the package and Python's own.
# The token comes by stdin, as a command line can be read by every user of the machine.
_BOOT = """
import json, sys
sys.path.append(sys.argv[1])
from autopipe.runtime.launch.guard import main
main(json.load(sys.stdin))
"""
_HOME = str(Path(__file__).parents[3])


class Store(Protocol):
    """What is needed of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Make `value` known to all ranks."""

    def get(self, key: str) -> bytes:
        """The value of `key`, as soon as it is set."""


class Verdict(NamedTuple):
    """Which rank was the first to die, and all that is known of it, as a sentence."""

    rank: int
    text: str


class Watchdog:
    """One rank's end of the watchdog; a context that the whole run happens in.

    Without a sidecar (`Watchdog()`) it knows of nobody, and no verdict.

    Args:
        memory: the three numbers that the sidecar reads, as `guard.Guard` has them.
    """

    def __init__(
        self,
        rank: int = 0,
        sidecar: subprocess.Popen[bytes] | None = None,
        control: socket.socket | None = None,
        memory: mmap.mmap | None = None,
    ) -> None:
        self.rank = rank
        self._sidecar = sidecar
        self._control = control
        self._memory = memory if memory is not None else mmap.mmap(-1, MEMORY)
        self._words = memoryview(self._memory).cast("q")
        self._process = os.getpid()
        self._learned = 0
        self._failed: BaseException | None = None
        self._verdict: Verdict | None = None
        self._coming = b""
        self._excepthook = sys.excepthook

    def join(self) -> None:
        """Return when this rank is watched, or cannot be; the sidecar has said why."""
        self._next(time.monotonic() + WAIT)

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """The rank is in step `step` for the time of the block, which needs all other ranks.

        What it is in at the end of the block remains if that is an exception.
        """
        words = self._words
        words[0], words[1], words[2] = step + 1, 0, INSIDE
        try:
            yield
        except BaseException:
            words[2] = OUTSIDE
            raise
        words[1], words[2] = 0, AFTER

    def between(self) -> None:
        """The rank is in the same step, in none of its programs."""
        self._words[1] = 0

    def learn(self, program: Sequence[Instruction]) -> Callable[[int], None]:
        """Tell of a program; returns what is to be called with the position of each instruction.

        A call of that takes 0.1 microseconds.
        """
        self._tell(learn=[(i.stage, describe(i)) for i in program])
        words, first = self._words, self._learned + 1
        self._learned += len(program)

        def watch(position: int) -> None:
            words[1] = first + position

        return watch

    def verdict(self, error: BaseException) -> Verdict | None:
        """Whose fault it is that this rank is about to end with `error`; the rank has to end.

        Waits until the rank that the verdict names has ended: what it says comes first then, and
        its code is the one that a launcher reports. The verdict becomes a note of `error`. If it
        names another rank, it has been printed; if it is this one, nobody else prints it.

        Returns:
            None if nobody knows, or no one is to know (KeyboardInterrupt).
        """
        if self._failed is None:
            self._failed = error
            if isinstance(error, KeyboardInterrupt):
                self._tell(cause="told", why="interrupted")
            else:
                kind = "echo" if is_echo(error) else "raised"
                self._tell(cause=kind, why=sentence(error))
                self._verdict = self._ask()
        found = self._verdict
        if found is not None:
            note = found.text
            if found.rank == self.rank:  # what was raised stands right above the note
                note = note.removesuffix(f": {sentence(error)}")
            if note not in getattr(error, "__notes__", []):
                error.add_note(note)
        return found

    def close(self) -> None:
        """Say goodbye: the end of this process is no death from here on.

        Rank 0 returns when all ranks have said so: the first to come is the last to leave. It keeps
        the run's store, and its sidecar the verdict.
        """
        control, self._control = self._control, None
        if control is None or self._sidecar is None or os.getpid() != self._process:
            return  # a child of the rank may have inherited this object
        if self._failed is not None:
            gc_pause.skip_last_search()  # it would keep the others waiting
        else:
            self._say(control, {"bye": True})
            try:
                self._sidecar.wait(None if self.rank == 0 else PATIENCE)
            except subprocess.TimeoutExpired:
                self._sidecar.kill()
                self._sidecar.wait()
        control.close()

    def __enter__(self) -> Watchdog:
        self._excepthook = sys.excepthook
        if self._sidecar is not None:
            # No block of ours sees a script's last error; `__exit__` takes the hook back.
            sys.excepthook = self._uncaught
            _current[:] = [self]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not _is_an_end(error):
            self.verdict(error)
        self.close()
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._excepthook

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Before Python prints what a script has not caught: add whose fault it is."""
        if os.getpid() == self._process:
            found = self.verdict(error)
            if found is not None and found.rank != self.rank and is_echo(error):
                traceback = None  # where it was waiting for a rank that is gone explains nothing
                error = error.with_traceback(None)
        self._excepthook(kind, error, traceback)

    def _tell(self, **message: object) -> None:
        if self._control is not None:
            self._say(self._control, message)

    def _say(self, control: socket.socket, message: Message) -> None:
        control.settimeout(PATIENCE)
        try:
            control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the sidecar is gone: from here on there is none

    def _ask(self) -> Verdict | None:
        """Listen to the sidecar until it has told the verdict, and that the others may end."""
        found, deadline = None, time.monotonic() + WAIT
        while (message := self._next(deadline)) is not None:
            if "verdict" in message:
                found = Verdict(message["rank"], message["verdict"])
            if "end" in message or (found is not None and found.rank == self.rank):
                break
        return found

    def _next(self, deadline: float) -> Message | None:
        """The sidecar's next message; None if it is gone, or says nothing before `deadline`."""
        while self._control is not None:
            line, newline, rest = self._coming.partition(b"\n")
            if newline:
                self._coming = rest
                message: Message = json.loads(line)
                return message
            self._control.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                part = self._control.recv(1 << 16)
            except OSError:
                break
            if not part:
                break
            self._coming += part
        return None


# The one of this process, or none; it stays for `voice`, which asks after the run has ended.
_current: list[Watchdog] = []


def verdict(error: BaseException) -> Verdict | None:
    """As `Watchdog.verdict`, for the watchdog of this process, if it has one."""
    return _current[-1].verdict(error) if _current else None


def _is_an_end(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and not error.code


def watch(store: Store, *, rank: int, size: int, node: int, local_rank: int, host: str) -> Watchdog:
    """Start this rank's sidecar; every rank of a run calls it.

    Args:
        store: the run's own.
        rank, size, node, local_rank: as in `launch.World`.
        host: where every rank reaches rank 0.

    Returns:
        A watchdog without a sidecar, where there can be none; then a line on stderr says why.
    """
    listener, address = None, None
    config: Message = {"rank": rank, "size": size, "node": node, "local_rank": local_rank}
    try:
        if rank == 0:
            listener = _listen(host)
            address = [host, listener.getsockname()[1], secrets.token_hex(16)]
        else:
            address = json.loads(store.get(KEY))
        # Rank 0 has said why there is no address.
        watchdog = Watchdog(rank) if address is None else _start(config, address, listener)
    except (OSError, AttributeError) as error:  # not Linux, or a Python built for an old one
        why = error if isinstance(error, OSError) else "only Linux has the calls that it takes"
        print(f"warning: rank {rank} runs without a watchdog: {why}", file=sys.stderr)
        watchdog, address = Watchdog(rank), None
    if rank == 0:
        store.set(KEY, json.dumps(address))
    if listener is not None:
        listener.close()  # the sidecar's copy is open
    return watchdog


def _listen(host: str) -> socket.socket:
    """Where the other sidecars come in; within one machine no other one does."""
    if host == LOCAL:
        return socket.create_server((host, 0), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return socket.create_server(("", 0), family=family, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def _start(config: Message, address: Sequence[object], listener: socket.socket | None) -> Watchdog:
    with ExitStack() as passed, ExitStack() as kept:
        memory, process = os.memfd_create("autopipe"), os.pidfd_open(os.getpid())
        own, control = socket.socketpair()
        passed.callback(os.close, memory)
        passed.callback(os.close, process)
        passed.enter_context(control)
        kept.enter_context(own)
        os.truncate(memory, MEMORY)
        files = {"memory": memory, "process": process, "control": control.fileno()}
        files |= {"listener": listener.fileno()} if listener is not None else {}
        sidecar = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, _HOME],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # whoever reads this rank's stdout does not wait for it
            pass_fds=tuple(files.values()),
        )
        kept.pop_all()
        host, port, token = address
        config = {**config, **files, "pid": os.getpid(), "host": host, "port": port, "token": token}
        assert sidecar.stdin is not None
        with sidecar.stdin as file:
            file.write(json.dumps(config).encode())
        watchdog = Watchdog(config["rank"], sidecar, own, mmap.mmap(memory, MEMORY))
    watchdog.join()
    return watchdog
