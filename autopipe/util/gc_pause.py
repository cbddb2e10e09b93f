"""Pause Python's garbage collector while modules are loaded and plans are made.

The collector searches all objects for reference cycles, whenever their number has grown by a
quarter. While modules are loaded and plans are made this takes an eighth to a fifth of the time,
and finds almost no garbage: fake tensors, graphs and tables live to the end.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within, the collector is paused; afterwards it is enabled if it was before."""
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searching:
            gc.enable()


@contextmanager
def loading() -> Iterator[None]:
    """Within, the collector is paused; afterwards loaded objects are in its oldest generation.

    Otherwise the first search walks all of torch: a tenth of the time that loading takes. In a
    program of autopipe's own (`in_a_program`) no later search walks it either.
    """
    with collector_paused():
        yield
        if _in_a_program:
            gc.freeze()
        elif not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation


def in_a_program() -> None:
    """Declare that this process runs an autopipe command: loaded modules live to its end."""
    global _in_a_program
    _in_a_program = True
    gc.freeze()
    atexit.register(_free_triton)


def until_exit() -> None:
    """Disable the collector for good: the process ends soon, by `end` if there is no error."""
    global _ends_soon
    _ends_soon = True
    gc.disable()
    atexit.register(skip_last_search)


def skip_last_search() -> None:
    """Spare Python the search of all objects at its end, which takes a second after large models.

    Where triton is loaded it is made all the same (`_free_triton`).
    """
    gc.freeze()
    _free_triton()


def _free_triton() -> None:
    """Let Python's last search free what triton has made, if it is loaded.

    Its bindings print a hundred lines about objects of theirs that are left (triton 3.9).
    """
    if "triton" in sys.modules:
        gc.unfreeze()


def end(code: int) -> None:
    """Flush the output and exit with `code`, skipping Python's and torch's teardown.

    The teardown frees memory module by module for half a second, just before the process ends.
    Has an effect only after `until_exit`.
    """
    if _ends_soon:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_ends_soon = False
_in_a_program = False
