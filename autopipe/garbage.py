"""Python's search for reference cycles rests where much is built and little of it is garbage.

The search walks through all objects that there are, again whenever their number has grown by a
quarter. While modules are loaded and plans are made it is an eighth to a fifth of the work, and
finds next to nothing: tensors without memory, graphs, and tables that live to the end.
"""

from __future__ import annotations

import atexit
import gc
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


def until_exit() -> None:
    """No search from now on, nor when the process ends, which is to be soon.

    Python looks through everything once more then: seconds, after a large model.
    """
    gc.disable()
    atexit.register(gc.freeze)
