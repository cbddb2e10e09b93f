"""A rank's side of the watchdog: it reports which step it is in, and asks which rank died first.

    with watchdog.at(7): ...             this rank is in step 7
    executor.watch = watchdog.learn(program)
                                         then `executor.watch(i)`: it is at instruction i
    watchdog.verdict(error)              it is about to end with this error: which rank died first?

    rank 2 (stage 1) died at step 7, forward of micro-batch 5: killed (its process is gone)

A process beside the rank does the rest (`runtime.launch.guard`). It reads three numbers in shared
memory, so that to report a position costs the rank a store into memory.

In a run with a watchdog, when one rank dies all others end with a code other than 0: within 2 s if
the rank was killed, within 15 s if it was stopped or its node cannot be reached. Each node prints
once which rank died first. A rank that has ended in good order while another one needs it for a
step is named too, within 15 s. Only the transport's time limit ends a run in which two nodes reach
rank 0's node but not each other.

Needs Linux 5.4 or later (pidfd). Elsewhere a warning is printed, and only that time limit is left.
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
"""Seconds that a rank waits for a verdict: more than the hub takes to reach one."""

PATIENCE = 5.0
"""Seconds for the sidecar to take a message, or to end after the goodbye of its rank."""

KEY = "autopipe/watchdog"
"""The key of the run's store that holds the address of rank 0's sidecar."""

LOCAL = "127.0.0.1"
"""The host to pass if all ranks are on one host."""

_BACKLOG = 1024  # sidecars that may connect before rank 0's accepts the first

# A sidecar sees autopipe and Python's library, no site-packages (-I -S): so it starts fast.
# The token comes by stdin, as every user of the machine can read a command line.
_BOOT = """
import json, sys
sys.path.append(sys.argv[1])
from autopipe.runtime.launch.guard import main
main(json.load(sys.stdin))
"""
_HOME = str(Path(__file__).parents[3])


class Store(Protocol):
    """The methods of `torch.distributed.Store` that this module calls."""

    def set(self, key: str, value: str) -> None:
        """Make `value` known to all ranks."""

    def get(self, key: str) -> bytes:
        """The value of `key`, as soon as it is set."""


class Verdict(NamedTuple):
    """The rank that died first, and a sentence that says where and how it died."""

    rank: int
    text: str


class Watchdog:
    """One rank's end of the watchdog; the whole run happens within it, as a context.

    Without a sidecar (`Watchdog()`) it watches nothing and has no verdict.

    Args:
        memory: the three numbers that the sidecar reads, as `guard.Guard` describes them.
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
        """Return when this rank is watched, or the sidecar has printed why it cannot be."""
        self._next(time.monotonic() + WAIT)

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Within, the rank is in step `step`, which needs all other ranks; afterwards behind it.

        After an exception the rank's instruction stays, so that an error can name it.
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
        """Report that the rank is still in its step, but at no instruction of a program."""
        self._words[1] = 0

    def learn(self, program: Sequence[Instruction]) -> Callable[[int], None]:
        """Announce a program; returns a function to call with the position of each instruction.

        A call of the function takes 0.1 microseconds.
        """
        self._tell(learn=[(i.stage, describe(i)) for i in program])
        words, first = self._words, self._learned + 1
        self._learned += len(program)

        def watch(position: int) -> None:
            words[1] = first + position

        return watch

    def verdict(self, error: BaseException) -> Verdict | None:
        """Report that this rank ends with `error`, and return which rank died first.

        Waits until the verdict's rank has ended, so that its output comes first and a launcher
        reports its code. Adds the verdict to `error` as a note. A verdict that names another rank
        has been printed already; only this rank prints one that names this rank.

        Returns:
            None: there is no sidecar, no verdict came, or `error` is a KeyboardInterrupt.
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
            if found.rank == self.rank:  # the error itself is printed right above the note
                note = note.removesuffix(f": {sentence(error)}")
            if note not in getattr(error, "__notes__", []):
                error.add_note(note)
        return found

    def close(self) -> None:
        """Say goodbye: from now on the end of this process is no death.

        On rank 0 it returns when all ranks have said goodbye, as rank 0 holds the run's store and
        its sidecar the hub.
        """
        control, self._control = self._control, None
        if control is None or self._sidecar is None or os.getpid() != self._process:
            return  # a child of the rank may have inherited this object
        if self._failed is not None:
            gc_pause.skip_last_search()  # a last collection would delay the other ranks' end
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
            # An error that a user's script does not catch reaches only this hook.
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
        """Add the verdict to an error that a script has not caught, before Python prints it."""
        if os.getpid() == self._process:
            found = self.verdict(error)
            if found is not None and found.rank != self.rank and is_echo(error):
                traceback = None  # where this rank waited for the dead one explains nothing
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
            pass  # the sidecar is gone: from now on the rank runs without one

    def _ask(self) -> Verdict | None:
        """The verdict; waits until its rank is this one, or the sidecar says that ranks may end."""
        verdict, deadline = None, time.monotonic() + WAIT
        while (message := self._next(deadline)) is not None:
            if "verdict" in message:
                verdict = Verdict(message["rank"], message["verdict"])
            if "end" in message or (verdict is not None and verdict.rank == self.rank):
                break
        return verdict

    def _next(self, deadline: float) -> Message | None:
        """The sidecar's next message; None: it is gone, or sends none before `deadline`."""
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


# This process's watchdog, if it has one; it stays for `voice`, which asks after the run has ended.
_current: list[Watchdog] = []


def verdict(error: BaseException) -> Verdict | None:
    """`Watchdog.verdict` of this process's watchdog; None: the process has no watchdog."""
    return _current[-1].verdict(error) if _current else None


def _is_an_end(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and not error.code


def watch(store: Store, *, rank: int, size: int, node: int, local_rank: int, host: str) -> Watchdog:
    """Start this rank's sidecar; every rank of a run calls it.

    Args:
        store: the run's.
        rank, size, node, local_rank: as in `launch.world.World`.
        host: a host name or address at which every rank reaches rank 0.

    Returns:
        A watchdog; if no sidecar can be started, one without, and a line on stderr says why.
    """
    listener, address = None, None
    config: Message = {"rank": rank, "size": size, "node": node, "local_rank": local_rank}
    try:
        if rank == 0:
            listener = _listen(host)
            address = {"host": host, "port": listener.getsockname()[1], "hub_node": node}
            address |= {"hub_local_rank": local_rank, "token": secrets.token_hex(16)}
        else:
            address = json.loads(store.get(KEY))
        # If there is no address, rank 0 has printed why.
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
    """The socket for the other ranks' sidecars; for this machine's alone if `host` is LOCAL."""
    if host == LOCAL:
        return socket.create_server((host, 0), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return socket.create_server(("", 0), family=family, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def _start(config: Message, address: Message, listener: socket.socket | None) -> Watchdog:
    with ExitStack() as passed, ExitStack() as kept:
        memory, process = os.memfd_create("autopipe"), os.pidfd_open(os.getpid())
        rank_end, control = socket.socketpair()
        passed.callback(os.close, memory)
        passed.callback(os.close, process)
        passed.enter_context(control)
        kept.enter_context(rank_end)
        os.truncate(memory, MEMORY)
        files = {"memory": memory, "process": process, "control": control.fileno()}
        files |= {"listener": listener.fileno()} if listener is not None else {}
        sidecar = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, _HOME],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # else a reader of the rank's stdout waits for the sidecar
            pass_fds=tuple(files.values()),
        )
        kept.pop_all()
        config = {**config, **files, **address, "pid": os.getpid()}
        assert sidecar.stdin is not None
        with sidecar.stdin as file:
            file.write(json.dumps(config).encode())
        watchdog = Watchdog(config["rank"], sidecar, rank_end, mmap.mmap(memory, MEMORY))
    watchdog.join()
    return watchdog
