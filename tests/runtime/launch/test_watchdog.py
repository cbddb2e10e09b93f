"""A rank that comes to harm in a real run: who is blamed, where, and how all others end.

The ranks (`watched.py`) are started as srun starts them: nobody but the watchdog ends any of them.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from autopipe.runtime.launch import watchdog
from autopipe.runtime.launch.spawn import free_port
from autopipe.runtime.launch.watchdog import Verdict, Watchdog, watch
from tests.support import warm
from tests.support.guards import running

SIZE = 4

linux = pytest.mark.skipif(sys.platform != "linux", reason="a sidecar needs Linux")


@dataclass
class Story:
    """What became of a run.

    Attributes:
        codes: how each rank has ended.
        errors: what the sidecars have said.
        told: the verdicts that ranks were given for their own exceptions.
        seconds: from the harm to the end of the last rank.
    """

    codes: list[int]
    errors: list[str]
    told: set[str]
    seconds: float


def story(folder: Path, rank: int, step: int, instruction: str, harm: str) -> Story:
    """Run four ranks of which one comes to harm, and see that nothing is left of them."""
    environ = {
        **os.environ,
        "TOKEN": str(folder),
        "OMP_NUM_THREADS": "1",
        **{"WORLD_SIZE": str(SIZE), "LOCAL_WORLD_SIZE": str(SIZE), "GROUP_RANK": "0"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    }
    argv = [
        str(Path(__file__).parents[2] / "support/watched.py"),
        str(rank),
        str(step),
        instruction,
        harm,
    ]
    ranks = []
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        for number in range(SIZE):
            own = {**environ, "RANK": str(number), "LOCAL_RANK": str(number)}
            ranks.append(warm.start(argv, own, out=out.fileno(), err=err.fileno()))
        try:
            codes = [process.wait(timeout=120) for process in ranks]
            ended = time.monotonic()
            while left := running(str(folder)):
                assert time.monotonic() < ended + 20, left
                time.sleep(0.05)
        finally:
            for process in ranks:
                process.kill()
    said = (folder / "out").read_text()
    found = re.search(r"^harm at (.*)$", said, re.MULTILINE)
    assert found is not None
    lines = (folder / "err").read_text().splitlines()
    errors = [line for line in lines if line.startswith(("error: ", "warning: "))]
    told = {line.partition(": ")[2] for line in said.splitlines() if re.match(r"\d: ", line)}
    return Story(codes, errors, told, ended - float(found[1]))


def check(found: Story, rank: int, text: str, *, code: int, limit: float) -> None:
    """Exactly one line names the rank, all who were told were told that, and everybody failed."""
    assert found.errors == [f"error: {text}"]
    assert found.told <= {str(Verdict(rank, text))}
    assert found.codes[rank] == code
    assert set(found.codes[:rank] + found.codes[rank + 1 :]) <= {1, -15}
    assert found.seconds < limit


@linux
@pytest.mark.parametrize(
    ("rank", "step", "instruction", "where"),
    [
        (2, 3, "2F1", "forward of micro-batch 1"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (1, 0, "1WAIT_B0<2", "waiting for the gradients of micro-batch 0 from stage 2"),
                (0, 1, "0SEND_F1>1", "sending the activations of micro-batch 1 to stage 1"),
                (3, 2, "3STEP", "waiting for the sums of its gradients"),
            )
        ),
    ],
)
def test_a_rank_that_is_killed(
    rank: int, step: int, instruction: str, where: str, tmp_path: Path
) -> None:
    found = story(tmp_path, rank, step, instruction, "kill")
    text = f"rank {rank} (stage {rank}) died at step {step}, {where}: killed (its process is gone)"
    check(found, rank, text, code=-9, limit=2)


@pytest.mark.long  # `test_chaos` stops one that waits
@linux
def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    found = story(tmp_path, 1, 2, "1B1", "stop")
    text = "rank 1 (stage 1) froze at step 2, backward of micro-batch 1: stopped for 5 s (SIGSTOP)"
    check(found, 1, text, code=-9, limit=15)


@pytest.mark.long  # `test_guard` has it, of ranks without torch
@linux
def test_a_rank_that_raises(tmp_path: Path) -> None:
    """It says so by itself, all others know it from the verdict, and no sidecar repeats it."""
    found = story(tmp_path, 2, 1, "2F0", "fail")
    assert found.errors == []
    text = (
        "rank 2 (stage 2) failed at step 1, forward of micro-batch 0: "
        "ZeroDivisionError: in the loss"
    )
    assert found.told == {str(Verdict(2, text))}
    assert found.codes[2] == 1 and set(found.codes) <= {1, -15}


@contextmanager
def busy() -> Iterator[None]:
    """Ten processes for each core, for the time of the block."""
    burn = [sys.executable, "-S", "-c", "while True: pass"]
    burning = [subprocess.Popen(burn) for _ in range(10 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


@pytest.mark.long
@linux
def test_a_rank_that_is_only_busy(tmp_path: Path) -> None:
    """12 s in C with the GIL held, on a machine that does ten other things: no reason to worry."""
    with busy():
        found = story(tmp_path, 1, 1, "1F1", "hold the GIL")
    assert (found.codes, found.errors, found.told) == ([0] * SIZE, [], set())
    assert found.seconds > 12


# --- in this process, which no sidecar watches


class Memory(dict[str, bytes]):
    """A store of one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


def test_without_a_sidecar() -> None:
    """One rank alone: the same calls, and nobody to hear them."""
    hook = sys.excepthook
    with pytest.raises(ZeroDivisionError) as raised, Watchdog() as dog, dog.at(3):
        dog.learn(())(0)
        raise ZeroDivisionError
    assert dog.verdict(raised.value) is None
    assert sys.excepthook is hook


def test_where_no_sidecar_can_be_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 says so, and the others do not look for it."""

    def refuse(pid: int) -> int:
        raise PermissionError("pidfd_open is not allowed in here")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    store = Memory()
    for rank in range(3):
        dog = watch(store, rank=rank, size=3, node=0, local_rank=rank, host=watchdog.LOCAL)
        with dog, dog.at(0):
            pass
    assert capsys.readouterr().err == (
        "warning: rank 0 runs without a watchdog: pidfd_open is not allowed in here\n"
    )


@linux
def test_without_the_calls_of_linux_a_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "memfd_create")
    with (
        watch(Memory(), rank=0, size=1, node=0, local_rank=0, host=watchdog.LOCAL) as dog,
        dog.at(0),
    ):
        pass
    assert capsys.readouterr().err == (
        "warning: rank 0 runs without a watchdog: only Linux has the calls that it takes\n"
    )


@linux
def test_one_rank_after_the_other(capfd: pytest.CaptureFixture[str]) -> None:
    """Two ranks of one process: rank 1 joins and leaves, and rank 0 waits for nobody any longer."""
    store = Memory()
    with watch(store, rank=0, size=2, node=0, local_rank=0, host=watchdog.LOCAL):
        with watch(store, rank=1, size=2, node=0, local_rank=1, host=watchdog.LOCAL) as dog:
            with dog.at(5):
                pass
    assert capfd.readouterr().err == ""
