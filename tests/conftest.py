"""What every test stands on: no network, one thread a process, long files at the start.

Tests marked `long` run where AUTOPIPE_LONG=1 asks for them (`make test-long`);
`tests/support/long.py` says what else the long run makes whole.
"""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.long import LONG

# transformers asks its hub about a configuration it is handed; the zoo builds all of them itself.
os.environ["HF_HUB_OFFLINE"] = "1"

# Before torch is imported: `make test` has a process per core, whose threads would be in each
# other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The first process of a run makes the folder of `tests/support/traces.py`; the others find it.
if "AUTOPIPE_TEST_TRACES" not in os.environ:
    os.environ["AUTOPIPE_TEST_TRACES"] = tempfile.mkdtemp(prefix="autopipe-traces-")
    atexit.register(shutil.rmtree, os.environ["AUTOPIPE_TEST_TRACES"], ignore_errors=True)
# autopipe checks its graphs after each pass, also in the processes that tests start.
os.environ["AUTOPIPE_SELF_CHECKS"] = "1"

TESTS = Path(__file__).parent

# Traces leave hundreds of thousands of objects in each process: collecting them at Python's own
# pace takes a tenth of the time of all tests.
gc.set_threshold(200_000, 50, 1000)

LONGEST = (
    "benchmarks/test_chaos.py",
    "benchmarks/test_zoo.py",
    "runtime/step/test_pipe.py",
    "planners/search/test_planners.py",
    "emit/test_emit.py",
    "planners/driver/test_make_plan.py",
    "cli/test_run.py",
    "planners/driver/test_profile.py",
    "planners/formulas/test_model_costs.py",
    "cli/test_start.py",
    "tracing/test_stubs.py",
    "whole/test_schedules_run.py",
    "whole/test_transparency.py",
    "stages/test_dry_run_repeats.py",
    "whole/test_first_models.py",
    "tracing/test_symbolic_sequence.py",
    "whole/test_save.py",
    "whole/test_families.py",
    "runtime/launch/test_guard.py",
    "whole/test_fuzz.py",
    "runtime/launch/test_watchdog.py",
    "whole/test_examples.py",
    "runtime/probe/test_workers.py",
    "ir/test_repeats.py",
)
"""The longest files, longest first: begun last, one would leave the other cores idle at the end.

test_chaos, which promises seconds, is done before test_watchdog makes the machine busy.
"""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not LONG:
        kept = [item for item in items if item.get_closest_marker("long") is None]
        if left := [item for item in items if item.get_closest_marker("long") is not None]:
            left[0].config.hook.pytest_deselected(items=left)
            items[:] = kept
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(TESTS).as_posix(), len(places)))
