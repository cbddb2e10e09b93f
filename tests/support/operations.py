"""How much Python code a call runs: what takes the place of seconds where a test holds a budget.

    lines(lambda: simulate(programs, costs))     every line that runs, each turn of a loop

The same at every run and on every machine, however busy. What C code does inside of one line does
not count.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines(run: Callable[[], object]) -> int:
    """The lines of Python that a call runs in this thread."""
    count = 0

    def counted(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return counted

    before = sys.gettrace()
    sys.settrace(counted)
    try:
        run()
    finally:
        sys.settrace(before)
    return count
