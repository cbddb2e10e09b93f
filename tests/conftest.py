"""What every test stands on: no network, one thread a process, and long files at the start."""

import os

import pytest

# transformers asks its hub about a configuration it is handed; the zoo builds all of them itself.
os.environ["HF_HUB_OFFLINE"] = "1"

# Before torch is imported: `make test` has a process per core, whose threads would be in each
# other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONGEST = (
    "test_chaos.py",
    "test_pipe.py",
    "test_planners.py",
    "test_emit.py",
    "test_sidecar.py",
    "test_fuzz.py",
    "test_profile.py",
    "test_watchdog.py",
    "test_cli_run.py",
    "test_schedules_run.py",
    "test_planning.py",
    "test_transparency.py",
    "test_benchmarks.py",
    "test_examples.py",
    "test_fully_sharded.py",
    "test_workers.py",
    "test_meter.py",
    "test_answer.py",
)
"""The longest files, longest first: begun last, one would leave the other cores idle at the end.

test_chaos, which promises seconds, is done before test_watchdog makes the machine busy.
"""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
