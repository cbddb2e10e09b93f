"""CPU seconds of a call, each time in a process that knows nothing of the call before."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

TIMES = 3


def timed(function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> tuple[R, float]:
    """What a call returns, and the median of its CPU seconds in `TIMES` processes.

    They are forks of this one: all is loaded and nothing planned, so that no schedule or table
    that the planner remembers is there already. What was loaded is not searched for garbage.
    """
    fork = multiprocessing.get_context("fork")
    with fork.Pool(1, initializer=gc.freeze, maxtasksperchild=1) as pool:
        runs = [pool.apply(_run, (function, arguments, named)) for _ in range(TIMES)]
    return runs[0][0], median(seconds for _, seconds in runs)


def _run(
    function: Callable[..., R], arguments: tuple[object, ...], named: dict[str, object]
) -> tuple[R, float]:
    begun = process_time()
    found = function(*arguments, **named)
    return found, process_time() - begun
