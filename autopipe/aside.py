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
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import torch

S = TypeVar("S")
T = TypeVar("T")

WORTH = 0.3
"""Seconds of work for which a fork pays: it takes 0.02 s, and as much again for every 50 MB that
the two write to, page by page (2-core VM, 2026-11)."""

_PATIENCE = 3.0, 5.0
"""Who waits for a copy gives up after so many times as long as it has been at work until then, and
so many seconds: longer than computing anew would take, and not for ever."""


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


def aside(compute: Callable[[], T], seconds: float) -> Aside[T]:
    """Let a copy of this process compute something, if it may (`forking`) and that pays (`WORTH`).

    Args:
        compute: gives something that is not None and can be pickled.
        seconds: about how long it takes.
    """
    allowed = _allowed.get()
    if allowed is None or seconds < WORTH or not _can_fork():
        return Aside(compute, None)
    return Aside(compute, allowed.copy(compute))


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
    allowed = _Copies()
    before = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(before)
        allowed.end()


def _can_fork() -> bool:
    """Whether a fork is safe and of use here.

    A device that is open does not work in the copy, and neither do process groups. A lock that
    another thread holds is held there for ever, so that none may be at work; those that wait for
    something, as progress bars' and OpenMP's do, hold none, or `_PATIENCE` helps.
    """
    return (
        sys.platform == "linux"
        and len(os.sched_getaffinity(0)) > 1
        and all(t.daemon for t in threading.enumerate() if t is not threading.current_thread())
        and not current_process().daemon
        and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
    )


class _Copies:
    """The one copy that there is."""

    def __init__(self) -> None:
        self._last: _Copy | None = None

    def copy(self, compute: Callable[[], object]) -> _Copy | None:
        self.end()
        try:
            self._last = _Copy(compute)
        except OSError:  # no memory for it
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


_allowed: ContextVar[_Copies | None] = ContextVar("allowed", default=None)


class _Copy:
    """A fork of this process that computes one thing."""

    def __init__(self, compute: Callable[[], object]) -> None:
        context = get_context("fork")
        self._begun = time.monotonic()
        self._came, to = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(compute, to), daemon=True)
        try:
            with to, warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of OpenMP's threads
                self._process.start()
        except OSError:
            self._came.close()
            raise

    @property
    def at_work(self) -> bool:
        """Whether it has neither found something nor failed."""
        return not self._came.closed and not self._came.poll()

    def found(self) -> Any:
        """The result; None if there is none in time."""
        factor, seconds = _PATIENCE
        try:
            if self._came.poll(factor * (time.monotonic() - self._begun) + seconds):
                return pickle.loads(self._came.recv_bytes())
        except (EOFError, OSError):  # it has failed, or another has ended it
            pass
        return None

    def end(self) -> None:
        """Leave nothing of it."""
        if not self._came.closed:
            self._came.close()
            self._process.kill()
            self._process.join()
            self._process.close()


def _work(compute: Callable[[], object], to: Connection) -> None:
    _allowed.set(None)
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        sys.stdout = sys.stderr = nowhere
        # Not `send`: torch has taught it to hand over tensors in memory that goes with the copy.
        to.send_bytes(pickle.dumps(compute(), pickle.HIGHEST_PROTOCOL))
