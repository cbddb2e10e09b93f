"""Traces of the zoo's models, each made once for all processes of a run of the tests.

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

from autopipe.tracing.trace import Trace

FOLDER = "AUTOPIPE_TEST_TRACES"
"""The variable that names the folder to every process of a run."""

FOUND: dict[str, Trace] = {}
"""What this process has had so far, by name."""


def kept(name: str, make: Callable[[], Trace]) -> Trace:
    """The trace of that name: the same object at every call in a process.

    Args:
        name: of a model of the zoo, and what else tells its trace from another.
        make: traces the model; called where no process of this run has done so before.
    """
    if name not in FOUND:
        FOUND[name] = _from_disk(name, make)
    return FOUND[name]


def _from_disk(name: str, make: Callable[[], Trace]) -> Trace:
    if FOLDER not in os.environ:  # a process that was started with no environment of the tests
        return make()
    path = Path(os.environ[FOLDER], hashlib.sha256(name.encode()).hexdigest()[:32])
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ranks ask at the same time: one traces, the others wait
        file.seek(0)
        if said := file.read():
            found = pickle.loads(said)
            assert isinstance(found, Trace)
            return found
        made = make()
        # A custom function is known only to the process that has traced it.
        if all(not node.op.startswith("autopipe.function") for node in made.graph.nodes):
            file.write(pickle.dumps(made))
    return made
