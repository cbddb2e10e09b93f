"""What every test stands on: no network, one thread a process, long files at the start.

Tests marked `long`, and most cases of a `sweep`, run where AUTOPIPE_LONG=1 asks for them
(`make test-long`); `tests/support/long.py` says what else the long run makes whole.
"""

import atexit
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import garbage
from tests.support.long import LONG

if TYPE_CHECKING:
    from tests.support.shell import Shell

# transformers asks its hub about a configuration it is handed; the zoo builds all of them itself.
os.environ["HF_HUB_OFFLINE"] = "1"

# Before torch is imported: `make test` has a process per core, whose threads would be in each
# other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# As `autopipe` has it, which begins anew where it is not set: once is enough.
os.environ.setdefault("PYTHONHASHSEED", "0")

# The first process of a run makes the folder of `tests/support/traces.py`; the others find it.
if "AUTOPIPE_TEST_TRACES" not in os.environ:
    os.environ["AUTOPIPE_TEST_TRACES"] = tempfile.mkdtemp(prefix="autopipe-traces-")
    atexit.register(shutil.rmtree, os.environ["AUTOPIPE_TEST_TRACES"], ignore_errors=True)
# autopipe checks its graphs after each pass, also in the processes that tests start.
os.environ["AUTOPIPE_SELF_CHECKS"] = "1"

TESTS = Path(__file__).parent

garbage.rarely()

LONGEST = (
    "benchmarks/test_chaos.py",
    "runtime/step/test_pipe.py",
    "benchmarks/test_zoo.py",
    "runtime/checkpoint/test_survives.py",
    "runtime/launch/test_guard.py",
    "planners/driver/test_make_plan.py",
    "checking/test_check.py",
    "checking/test_check_models.py",
    "emit/test_emitted_runs.py",
    "emit/test_edited_files.py",
    "runtime/probe/test_workers.py",
    "runtime/step/test_memory_meter.py",
    "tracing/capture/test_stubs.py",
    "planners/search/test_planners.py",
    "runtime/checkpoint/test_any_plan.py",
    "sharding/test_strategies.py",
    "whole/test_transparency.py",
    "planners/driver/test_engines.py",
    "planners/driver/test_loss_parts.py",
    "runtime/step/test_compile.py",
    "planners/formulas/test_model_costs.py",
    "cli/test_run.py",
    "runtime/test_parallelize.py",
    "runtime/step/test_prepare.py",
    "cli/test_start.py",
    "runtime/launch/test_voice.py",
    "opaque/test_regions.py",
    "benchmarks/test_pipeline.py",
    "runtime/launch/test_watchdog.py",
    "runtime/parameters/test_zero3.py",
    "runtime/test_feed.py",
    "runtime/test_onnx_stages.py",
    "runtime/checkpoint/test_full_disk.py",
)
"""The longest files, longest first: begun last, one would leave the other cores idle at the end.

test_chaos, which promises seconds, is done before test_watchdog makes the machine busy.
"""


def left_to_the_long_run(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """What is marked `long`, and of a `sweep(of=4)` three of every four cases."""
    seen: Counter[str] = Counter()
    for item in items:
        if sweep := item.get_closest_marker("sweep"):
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if (seen[test] - 1) % sweep.kwargs["of"]:
                yield item
                continue
        if item.get_closest_marker("long"):
            yield item


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if left := [] if LONG else [*left_to_the_long_run(items)]:
        left[0].config.hook.pytest_deselected(items=left)
        gone = {*left}
        items[:] = [item for item in items if item not in gone]
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(TESTS).as_posix(), len(places)))


def pytest_runtest_setup() -> None:
    """A test that opens a group of one process leaves torch with all cores for what comes after it.

    Where each core has a process of tests already, their threads wait for each other, busily.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_finish() -> None:
    """All modules of tests are imported by now, and stay."""
    garbage.rarely()


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    """What a test leaves switched on decides over tests that come after it in its process."""
    yield
    if torch := sys.modules.get("torch"):
        assert not torch.overrides.has_torch_function((torch.empty(0),)), "a mode is left"
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() == torch.float32
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture
def autopipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> "Shell":
    """The command line, as one types it in a folder of the test's own."""
    from tests.support.shell import Shell  # imports torch, which not all processes need

    return Shell(tmp_path, monkeypatch, capsys)
