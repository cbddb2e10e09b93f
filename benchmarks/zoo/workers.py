"""One process a model, several at a time, each with a limit: a crash or a hang costs one model.

The processes are forks of this one, which has imported torch and the libraries of models once.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from benchmarks.zoo import trial
from benchmarks.zoo.odd import common
from benchmarks.zoo.row import Row
from benchmarks.zoo.subject import Subject
from tests.support import garbage

MEMORY = 16 * 2**30
"""Bytes of addresses of one process: a model that is not tiny ends with an error of its own."""

WAITING = 15
"""So much longer a model may take where other programs have the cores."""

Rows = list[dict[str, Any]]


@dataclass
class Running:
    """A model that is being tried in a process."""

    subject: Subject
    process: BaseProcess
    ended: float
    rows: Rows = field(default_factory=list)


def tried(
    subjects: Sequence[Subject], ways: tuple[str, ...], jobs: int, limit: float
) -> Iterator[Rows]:
    """The rows of each model as it is done.

    Args:
        limit: seconds of a core for one model, and `WAITING` times as many on the clock; what it
            has not said by then is "timeout".
    """
    _without_threads()
    if len(subjects) > 1:
        _warm(ways)
    fork = multiprocessing.get_context("fork")
    pending = list(reversed(subjects))
    running: dict[Connection, Running] = {}
    while pending or running:
        while pending and len(running) < jobs:
            subject = pending.pop()
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_try, args=(subject, ways, limit, theirs))
            process.start()
            theirs.close()
            running[ours] = Running(subject, process, time.monotonic() + WAITING * limit)
        for connection in wait(list(running), timeout=0.5):
            assert isinstance(connection, Connection)
            try:
                running[connection].rows.append(connection.recv())
            except EOFError:
                one = running.pop(connection)
                one.process.join()
                late = one.process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
                yield _done(one, ways, "timeout" if late else "crashed")
        for connection, one in list(running.items()):
            if time.monotonic() > one.ended:
                os.killpg(one.process.pid, signal.SIGKILL)
                yield _done(running.pop(connection), ways, "timeout")


def _without_threads() -> None:
    """Let backward run in this process's forks, and in theirs: ranks are forks of a model's.

    Backward starts a thread for each device at its first run, after which no fork can run it. None
    is seen here: a GPU is hidden, and what fake tensors announce in its place, where torch was
    built with CUDA, comes later.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def _warm(ways: tuple[str, ...]) -> None:
    """Load what tracing, planning and running import late, 1 to 2 s, so that no fork has to."""
    for _ in trial.rows(next(common.subjects()), ways):
        pass
    gc.collect()
    garbage.rarely()  # nor does a fork copy the pages of what is there by now, to count references


def _done(one: Running, ways: tuple[str, ...], otherwise: str) -> Rows:
    """The rows of a model whose process has ended, all ways among them."""
    one.process.join()
    said = {row["what"] for row in one.rows}
    if "build" not in said:
        cause = f"the process ended with code {one.process.exitcode}"
        left = [way for way in ways if way not in said]
        rows = [Row(one.subject.name, way, otherwise, cause) for way in left]
        one.rows += [asdict(row) for row in rows]
    return one.rows


def _try(subject: Subject, ways: tuple[str, ...], limit: float, to: Connection) -> None:
    """The whole of a process: rows go to the connection, what libraries print goes nowhere."""
    os.setsid()  # what it starts ends with it
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (round(limit), round(limit)))
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        sys.stderr = nowhere
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        for row in trial.rows(subject, ways):
            to.send(row)
    to.close()
    os._exit(0)
