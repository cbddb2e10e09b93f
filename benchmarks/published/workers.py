"""Work for many rows, each in a process of its own: one that hangs or dies costs its row alone.

A process is a fork of this one, which has imported everything and computed nothing.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Line = dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Running(Generic[Item]):
    item: Item
    process: BaseProcess
    answer: Connection
    begun: float


def done(
    items: Sequence[Item], work: Callable[[Item], Line], *, jobs: int = 1, limit: float
) -> Iterator[tuple[Item, Line]]:
    """Each item with what `work` says of it, in the order in which they end.

    Args:
        jobs: processes at a time.
        limit: seconds after which a process is killed; its line is then `{"failed": "..."}`, as
            that of one which dies.
    """
    context = multiprocessing.get_context("fork")
    left, running = list(reversed(items)), list[_Running[Item]]()
    try:
        while left or running:
            while left and len(running) < jobs:
                running.append(_start(context, left.pop(), work))
            soonest = min(each.begun for each in running) + limit - time.monotonic()
            wait([each.answer for each in running], timeout=max(0.0, soonest))
            for each in list(running):
                line = _ended(each, limit)
                if line is not None:
                    running.remove(each)
                    yield each.item, line
    finally:
        for each in running:
            each.process.kill()
            each.process.join()


def _start(context: Any, item: Item, work: Callable[[Item], Line]) -> _Running[Item]:
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(there, work, item))
    process.start()
    there.close()  # so that the end of the process is the end of the pipe
    return _Running(item, process, here, time.monotonic())


def _tell(answer: Connection, work: Callable[[Item], Line], item: Item) -> None:
    answer.send(work(item))


def _ended(each: _Running[Item], limit: float) -> Line | None:
    """What a process has said; None: it is still at work."""
    took = time.monotonic() - each.begun
    line: Line
    if each.answer.poll():
        try:
            line = each.answer.recv()
        except EOFError:
            each.process.join()
            line = {"failed": f"its process ended with {each.process.exitcode}"}
    elif took > limit:
        line = {"failed": f"not done after {limit:g} s"}
    else:
        return None
    each.process.kill()
    each.process.join()
    each.answer.close()
    return {**line, "took": round(took, 1)}
