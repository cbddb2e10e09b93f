"""Python's search for reference cycles rests where much is built and little of it is garbage.

The search walks through all objects that there are, again whenever their number has grown by a
quarter. While modules are loaded and plans are made it is an eighth to a fifth of the work, and
finds next to nothing: tensors without memory, graphs, and tables that live to the end.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def resting() -> Iterator[None]:
    """No search inside; afterwards it is on again if it was before."""
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searching:
            gc.enable()


@contextmanager
def loading() -> Iterator[None]:
    """No search inside, nor for it afterwards: what is loaded lives on, and counts as old at once.

    Else the first search looks through all of torch: a tenth of the time that loading takes. In a
    program of autopipe's own (`in_a_program`) no later search looks through it either.
    """
    with resting():
        yield
        if _in_a_program:
            gc.freeze()
        elif not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation


def in_a_program() -> None:
    """This process runs a command of autopipe's: what is loaded lives to its end."""
    global _in_a_program
    _in_a_program = True
    gc.freeze()


def until_exit() -> None:
    """No search from now on: the process is to end soon, by `end` if all goes well."""
    global _ends_soon
    _ends_soon = True
    gc.disable()
    atexit.register(gc.freeze)  # else Python looks through everything once more then


def end(code: int) -> None:
    """End the process with what it has written, and without taking apart what it has built.

    Python and torch give back module by module what goes with the process anyway: half a second.
    Only after `until_exit`; else nothing happens.
    """
    if _ends_soon:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_ends_soon = False
_in_a_program = False
