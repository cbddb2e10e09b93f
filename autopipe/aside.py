"""Work aside: a copy of this process computes what will be wanted, while this one goes on.

    this process ----+-- goes on -----------------------+-- .result ----
                     | fork                             | pickle
    its copy         +-- compute() ---------------o-----+

A copy has all that there is, so nothing is sent to it; its result comes back, and what else it
changes or prints goes with it. Whether there is one makes no difference to the result: who asks
computes it here where a second core or the right to fork is missing, or where the copy has failed.
There is one copy at a time: the next one ends it.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import numpy as np
import torch

S = TypeVar("S")
T = TypeVar("T")

WORTH_SECONDS = 0.3
"""Work for which a fork pays: it takes 0.02 s, and as much again for every 50 MB that
the two write to, page by page (2-core VM, 2026-11)."""

PATIENCE, PATIENCE_SECONDS = 3.0, 5.0
"""Who waits for a copy gives up after so many times as long as it should take, or has taken when
it was asked for, and so many seconds: it may wait for a lock that nobody will open."""


class Aside(Generic[T]):
    """What is computed aside."""

    def __init__(self, compute: Callable[[], T], copy: _Copy | None) -> None:
        self._compute = compute
        self._copy = copy

    @cached_property
    def offered(self) -> T | None:
        """What the copy has found, which is waited for; None if there is no copy, or it failed."""
        return self._copy.found() if self._copy is not None else None

    @cached_property
    def result(self) -> T:
        """What the copy has found, or else is computed here.

        Raises:
            Exception: what `compute` raises.
        """
        return self._compute() if self.offered is None else self.offered

    def drop(self) -> None:
        """Nobody will ask: end the copy."""
        if self._copy is not None:
            self._copy.end()


def aside(compute: Callable[[], T], seconds: float) -> Aside[T]:
    """Let a copy of this process compute something, if it may (`forking`) and that pays.

    Args:
        compute: gives something that is not None and can be pickled.
        seconds: about how long it takes; worth a copy from `WORTH_SECONDS` on.
    """
    allowed = _allowed.get()
    if allowed is None or seconds < WORTH_SECONDS or not _can_fork():
        return Aside(compute, None)
    return Aside(compute, allowed.copy(compute, seconds))


def half_aside(compute: Callable[[S], T], items: Sequence[S], seconds: float) -> list[T]:
    """What is computed of each item, half of them aside if no copy is at work.

    Args:
        seconds: about how long one item takes.
    """
    here = items[: (len(items) + 1) // 2]
    there = items[len(here) :]
    allowed = _allowed.get()
    if allowed is None or allowed.at_work:
        return [*map(compute, items)]
    others = aside(lambda: [*map(compute, there)], seconds * len(there))
    return [*map(compute, here), *others.result]


@contextmanager
def forking() -> Iterator[None]:
    """Within, `aside` may fork; no copy outlives it."""
    allowed = _Allowed()
    before = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(before)
        allowed.end()


def _can_fork() -> bool:
    """Whether a fork is safe and of use here.

    A device that is open does not work in the copy, and neither do process groups. A lock that
    another thread holds is held there for ever, so that none may be at work. Daemons are taken to
    wait for something, as progress bars' and OpenMP's threads do; else `PATIENCE` helps.
    """
    return (
        sys.platform == "linux"
        and len(os.sched_getaffinity(0)) > 1
        and all(t.daemon for t in threading.enumerate() if t is not threading.current_thread())
        and not current_process().daemon
        and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
    )


class _Allowed:
    """Whoever has this may have one copy."""

    def __init__(self) -> None:
        self._last: _Copy | None = None

    def copy(self, compute: Callable[[], object], seconds: float) -> _Copy | None:
        """A new one, in the place of the last; None if it cannot be had."""
        self.end()
        try:
            self._last = _Copy(compute, seconds)
        except (OSError, RuntimeError):  # there is no memory for it, or Python is about to end
            self._last = None
        return self._last

    @property
    def at_work(self) -> bool:
        """Whether there is one that has neither found something nor failed."""
        return self._last is not None and self._last.at_work

    def end(self) -> None:
        """End it."""
        if self._last is not None:
            self._last.end()


_allowed: ContextVar[_Allowed | None] = ContextVar("allowed", default=None)


class _Copy:
    """A fork of this process that computes one thing."""

    def __init__(self, compute: Callable[[], object], seconds: float) -> None:
        context = get_context("fork")
        self._begun, self._seconds = time.monotonic(), seconds
        self._came, to = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(compute, self._came, to), daemon=True)
        self._found: Any = None
        try:
            with to, warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of OpenMP's threads
                self._process.start()
        except BaseException:
            self._came.close()
            raise

    @property
    def at_work(self) -> bool:
        """Whether it has neither found something nor failed."""
        return not self._came.closed and not self._came.poll()

    def found(self) -> Any:
        """The result; None if there is none in time. It is the end of the copy."""
        if not self._came.closed:
            taken = time.monotonic() - self._begun
            self._receive(PATIENCE * max(taken, self._seconds) + PATIENCE_SECONDS)
            self.end()
        return self._found

    def end(self) -> None:
        """Leave nothing of it but what it has found."""
        if self._came.closed:
            return
        self._receive(0)
        with suppress(ValueError):  # it is gone, or somebody else waits for children
            self._process.kill()
            self._process.join()
            self._process.close()
        self._came.close()

    def _receive(self, patience: float) -> None:
        # An end of the pipe: it has failed. What cannot be unpickled is as good as nothing.
        with suppress(Exception):
            if self._found is None and self._came.poll(patience):
                self._found = pickle.loads(self._came.recv_bytes())


def _work(compute: Callable[[], object], theirs: Connection, to: Connection) -> None:
    _allowed.set(None)
    theirs.close()  # else the pipe would not break when the other process ends
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        sys.stdout = sys.stderr = nowhere
        before = _dice()
        found = compute()
        if _dice() != before:
            return  # it has rolled dice, which would have fallen otherwise in the other process
        # Not `send`: torch has taught it to hand over tensors in memory that goes with the copy.
        to.send_bytes(pickle.dumps(found, pickle.HIGHEST_PROTOCOL))


def _dice() -> bytes:
    """The state of Python's and numpy's random numbers; a trace leaves torch's as they were."""
    return pickle.dumps((random.getstate(), np.random.get_state()))
