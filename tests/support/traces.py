"""Traces of the zoo's models and rehearsals of their stages, made once for a run of the tests.

    kept("gpt", make)  ->  Trace      as it was found in this process, or on disk, or else by `make`

The folder on disk is one run's alone: `conftest.py` makes it empty, and throws it away at the end.
So what lies in it was traced by the code that is being tested, whatever its version.
"""

import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from autopipe.tracing.traced import Trace

_Kept = TypeVar("_Kept")

FOLDER = "AUTOPIPE_TEST_TRACES"
"""The variable that names the folder to every process of a run."""

FOUND: dict[str, Any] = {}
"""What this process has had so far, by name."""


def kept(name: str, make: Callable[[], _Kept]) -> _Kept:
    """What has that name: the same object at every call in a process.

    Args:
        name: of a model of the zoo, and what else tells its trace, or its rehearsal, from another.
        make: makes it; called where no process of this run has done so before.
    """
    if name not in FOUND:
        FOUND[name] = _from_disk(name, make)
    return FOUND[name]  # type: ignore[no-any-return]


def _from_disk(name: str, make: Callable[[], _Kept]) -> _Kept:
    if FOLDER not in os.environ:  # a process that was started with no environment of the tests
        return make()
    path = Path(os.environ[FOLDER], hashlib.sha256(name.encode()).hexdigest()[:32])
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ranks ask at the same time: one traces, the others wait
        file.seek(0)
        if said := file.read():
            return pickle.loads(said)  # type: ignore[no-any-return]
        made = make()
        if not isinstance(made, Trace) or not _of_this_process(made):
            file.write(pickle.dumps(made))
    return made


def _of_this_process(trace: Trace) -> bool:
    """Whether it has a custom function, known only to the process that has traced it."""
    return any(node.op.startswith("autopipe.function") for node in trace.graph.nodes)
