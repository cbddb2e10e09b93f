"""A copy of the process computes what this one would, or this one does."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch

from autopipe import aside as module
from autopipe.aside import WORTH_SECONDS, forking, half_aside

here = os.getpid()


aside = partial(module.aside, seconds=WORTH_SECONDS)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="others do not fork")


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an idle machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


@pytest.fixture
def allowed() -> Iterator[None]:
    with forking():
        yield


def test_a_copy_computes_while_this_process_goes_on(allowed: None) -> None:
    begun = time.monotonic()
    other = aside(lambda: (time.sleep(0.5), os.getpid())[1])
    time.sleep(0.5)
    assert other.result != here
    assert time.monotonic() - begun < 0.95
    assert other.result is other.result


def test_without_the_right_to_fork_who_asks_computes() -> None:
    asked: list[int] = []
    other = aside(lambda: asked.append(os.getpid()) or 3)
    assert other.offered is None
    assert not asked
    assert (other.result, other.result) == (3, 3)
    assert asked == [here]


@pytest.mark.parametrize("why", ["one core", "a thread at work", "a process group", "no memory"])
def test_where_a_fork_is_not_safe_or_of_no_use_there_is_none(
    allowed: None, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    stop = threading.Event()
    worker = threading.Thread(target=stop.wait)
    if why == "one core":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    elif why == "a thread at work":
        worker.start()
    elif why == "a process group":
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    else:

        def full() -> int:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(os, "fork", full)
    try:
        assert aside(os.getpid).result == here
    finally:
        stop.set()


def test_threads_that_only_wait_are_no_obstacle(allowed: None) -> None:
    """Progress bars have such a one. OpenMP's are in the way of a copy that computes with some."""
    stop = threading.Event()
    threading.Thread(target=stop.wait, daemon=True).start()
    torch.ones(1000, 1000).exp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pid, total = aside(lambda: (os.getpid(), float(torch.ones(1000, 1000).sum()))).result
    stop.set()
    assert pid != here
    assert total == 1e6


def test_what_does_not_pay_is_computed_here(allowed: None) -> None:
    assert module.aside(os.getpid, seconds=WORTH_SECONDS / 2).result == here
    assert module.aside(os.getpid, seconds=WORTH_SECONDS * 2).result != here


def test_what_fails_in_the_copy_fails_here(allowed: None) -> None:
    def fails() -> int:
        raise ValueError(f"in {os.getpid()}")

    with pytest.raises(ValueError, match=f"in {here}"):
        _ = aside(fails).result


def test_what_cannot_be_sent_is_computed_here(allowed: None) -> None:
    assert aside(lambda: lambda: os.getpid()).result() == here


def test_tensors_outlive_the_copy(allowed: None) -> None:
    found = aside(lambda: [torch.arange(5), torch.float16]).result
    assert not active_children()
    assert found[0].tolist() == [0, 1, 2, 3, 4]
    assert found[1] is torch.float16


def test_what_a_copy_prints_and_changes_goes_with_it(
    allowed: None, capfd: pytest.CaptureFixture[str]
) -> None:
    changed: list[int] = []

    def compute() -> int:
        print("a line")
        print("another", file=sys.stderr)
        changed.append(1)
        return len(changed)

    assert aside(compute).result == 1
    assert not changed
    assert capfd.readouterr() == ("", "")


def test_there_is_one_copy_at_a_time_and_none_afterwards() -> None:
    with forking():
        first = aside(lambda: (time.sleep(60), 1)[1] if os.getpid() != here else 2)
        second = aside(lambda: (time.sleep(60), 1)[1])
        assert len(active_children()) == 1
        assert first.result == 2  # the second has ended its copy
        begun = time.monotonic()
    assert not active_children()
    assert time.monotonic() - begun < 5
    assert second.offered is None


def test_nobody_waits_for_ever(allowed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in which a lock is held by a thread that it does not have."""
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.2)
    lock = threading.Lock()
    with lock:
        other = aside(lambda: lock.acquire() and os.getpid())
    assert other.result == here


def test_it_takes_as_long_as_was_said(allowed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    assert module.aside(lambda: (time.sleep(0.5), os.getpid())[1], seconds=0.5).result != here


def test_who_rolls_dice_is_not_believed(allowed: None) -> None:
    """Python gives a fork other random numbers, and the other process would have gone on."""
    assert aside(lambda: (random.random(), os.getpid())[1]).result == here
    assert aside(lambda: (np.random.rand(), os.getpid())[1]).result == here


def test_what_cannot_be_read_is_computed_here(allowed: None) -> None:
    class TwoArguments(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(one)

    global Unreadable
    Unreadable = TwoArguments
    TwoArguments.__qualname__ = "Unreadable"
    found = aside(lambda: (TwoArguments(1, 2), os.getpid())).result
    assert found[1] == here


def test_a_copy_ends_with_its_process(tmp_path: Path) -> None:
    """What it has found is more than a pipe holds."""
    code = """
import os, pathlib, signal, sys, time
from autopipe import aside
os.sched_getaffinity = lambda _: {0, 1}
def compute():
    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
    return bytes(10**6)
with aside.forking():
    aside.aside(compute, 1.0)
    while not pathlib.Path(sys.argv[1]).exists() or not pathlib.Path(sys.argv[1]).read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    told = tmp_path / "pid"
    subprocess.run([sys.executable, "-c", code, str(told)], check=False)
    for _ in range(500):
        if not Path(f"/proc/{told.read_text()}").exists():
            return
        time.sleep(0.01)
    pytest.fail("the copy is still there")


def test_what_was_found_and_not_asked_for_yet_is_kept(allowed: None) -> None:
    first = aside(os.getpid)
    time.sleep(0.3)
    assert aside(os.getpid).result != here
    assert first.result != here


def test_what_is_dropped_is_computed_here(allowed: None) -> None:
    other = aside(lambda: (time.sleep(1), os.getpid())[1] if os.getpid() != here else here)
    other.drop()
    assert not active_children()
    assert other.result == here


def test_a_copy_has_no_copies(allowed: None) -> None:
    theirs, inner = aside(lambda: (os.getpid(), aside(os.getpid).result)).result
    assert theirs == inner != here


@pytest.mark.parametrize("count", range(5))
def test_half_of_several_are_computed_aside_and_come_in_order(allowed: None, count: int) -> None:
    found = half_aside(lambda n: (n, os.getpid()), range(count), WORTH_SECONDS)
    assert [n for n, _ in found] == [*range(count)]
    assert sum(pid != here for _, pid in found) == count // 2


def test_halves_leave_a_copy_at_work_alone(allowed: None) -> None:
    other = aside(lambda: (time.sleep(0.3), os.getpid())[1])
    assert half_aside(lambda n: (n, os.getpid()), range(2), WORTH_SECONDS) == [(0, here), (1, here)]
    assert other.result != here


def test_children_that_nobody_waits_for(allowed: None) -> None:
    """The last test: multiprocessing takes the child for alive from now on."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert aside(os.getpid).result != here
    finally:
        signal.signal(signal.SIGCHLD, before)
