"""One process a model, several at a time, each with a limit: a crash or a hang costs one model.

The processes are forks of this one, which has imported torch and the libraries of models once.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.zoo import trial
from benchmarks.zoo.subject import Subject

MEMORY = 12 * 2**30
"""Bytes of addresses of one process: a model that is not tiny ends with an error of its own."""

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
        limit: seconds for one model; what it has not said by then is "timeout".
    """
    fork = multiprocessing.get_context("fork")
    pending = list(reversed(subjects))
    running: dict[Connection, Running] = {}
    while pending or running:
        while pending and len(running) < jobs:
            subject = pending.pop()
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_try, args=(subject, ways, theirs))
            process.start()
            theirs.close()
            running[ours] = Running(subject, process, time.monotonic() + limit)
        for connection in wait(list(running), timeout=0.5):
            assert isinstance(connection, Connection)
            try:
                running[connection].rows.append(connection.recv())
            except EOFError:
                yield _done(running.pop(connection), ways, "crashed")
        for connection, one in list(running.items()):
            if time.monotonic() > one.ended:
                one.process.kill()
                yield _done(running.pop(connection), ways, "timeout")


def _done(one: Running, ways: tuple[str, ...], otherwise: str) -> Rows:
    """The rows of a model whose process has ended, all ways among them."""
    one.process.join()
    said = {row["what"] for row in one.rows}
    if "build" not in said:
        cause = f"the process ended with code {one.process.exitcode}"
        left = [way for way in ways if way not in said]
        rows = [trial.Row(one.subject.name, way, otherwise, cause) for way in left]
        one.rows += [asdict(row) for row in rows]
    return one.rows


def _try(subject: Subject, ways: tuple[str, ...], to: Connection) -> None:
    """The whole of a process: rows go to the connection, what libraries print goes nowhere."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        sys.stderr = nowhere
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        for row in trial.rows(subject, ways):
            to.send(row)
    to.close()
    os._exit(0)
