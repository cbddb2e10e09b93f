"""The processes that measure, real ones: quick, slow, dead, hanging and never there.

A story is what one of them does before it measures. Budgets are an eighth of those of users, so
that figures are rough, but for that of the story.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from autopipe.cluster.measured import EVERYTHING, Found, Need, Record, checked, figures
from autopipe.cluster.spec import LocalSpec
from autopipe.planfile.contents import Plan
from autopipe.runtime.probe import measuring, workers
from tests.support.shell import Shell

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stories of a processor")

QUICK = "measuring.SECONDS = {name: s / 8 for name, s in measuring.SECONDS.items()}\n"

SLOW = """
import time
from autopipe.runtime.probe import subjects
gelu = subjects.SUBJECTS["gelu"]
def slow(x):
    end = time.thread_time() + 2e-6 * x.numel()  # a thousand times as long as it takes
    while time.thread_time() < end:
        pass
    return x * 2
subjects.SUBJECTS["gelu"] = subjects.Subject(lambda device: slow, gelu.shape, gelu.rows)
"""

DIES = """
def die(x, *args, how=measuring.microbench.memory):
    import multiprocessing
    if multiprocessing.current_process().name.endswith("-2"):
        sys.exit("no such thing")
    return how(x, *args)
measuring.microbench.memory = die
"""

KILLED = DIES.replace('sys.exit("no such thing")', "import os; os.kill(os.getpid(), 9)")

HANGS = """
def hang(limit):
    import time
    time.sleep(3600)
measuring.microbench.memory = hang
"""

CANNOT = """
def cannot(*args):
    raise RuntimeError("not implemented for 'BFloat16'\\nand more")
matmuls = measuring.microbench.matmuls
measuring.microbench.matmuls = lambda dtype, *args: (
    cannot() if dtype.itemsize == 2 else matmuls(dtype, *args)
)
"""


def measure(
    monkeypatch: pytest.MonkeyPatch, names: Sequence[str], story: str = "", processes: int = 2
) -> tuple[dict[str, Found], list[str]]:
    monkeypatch.setattr(workers, "COMMAND", workers.command(QUICK + story + "measuring.main()"))
    lines: list[str] = []
    return workers.measure(LocalSpec(processes), names, 16.0, lines.append), lines


@pytest.mark.long
def test_the_figures_are_those_of_some_computer(monkeypatch: pytest.MonkeyPatch) -> None:
    need = Need(("fp32", "bf16"), ("gelu", "linear"))
    names = figures(need, 2, False)
    found, talk = measure(monkeypatch, names)
    checked(Record({}, found))
    assert (*found,) == names
    (rate, half), (bandwidth,) = found["fp32"].values, found["memory"].values
    assert 1e8 < rate < 1e14 and half >= 0
    assert 1e5 < found["bf16"].values[0] < 1e15
    assert 1e7 < bandwidth < 1e13
    assert all(1e-7 < seconds < 0.1 for seconds in found["launch"].values)
    latency, link = found["messages"].values
    assert 1e-6 < latency < 0.5 and 1e5 < link < 1e12
    assert all(1e-5 < seconds < 60 for seconds in found["collectives"].values)
    words = (
        *("measuring this machine, about", "fp32", "memory", "small op", "between processes"),
        *("summed in", "by themselves: linear, gelu", "bf16"),
    )
    lines = iter(talk)
    assert all(any(word in line for line in lines) for word in words)  # in this order


@pytest.mark.long  # `test_microbench` has what runs out of time, in this process
def test_an_op_a_thousand_times_slower_is_rough_and_the_rest_is_not_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """512 rows of 512 elements would take it half a second, forward alone; it has a third."""
    found, _ = measure(monkeypatch, ["gelu", "tanh"], SLOW)
    assert found["gelu"].rough.startswith("out of time after ")
    assert 1e3 < found["gelu"].values[1] < 1e6  # 2 us an element, or more beside other programs
    assert found["tanh"].values[1] > 1e6


@pytest.mark.long
@pytest.mark.parametrize(("story", "code"), [(DIES, "1: no such thing"), (KILLED, "-9")])
def test_what_ends_the_processes_is_left_out(
    story: str, code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: a folder's name with a character of URLs let them meet in a file of another place."""
    folder = tmp_path / "a#b"
    folder.mkdir()
    monkeypatch.setattr(workers.tempfile, "tempdir", str(folder))
    found, talk = measure(monkeypatch, ["launch", "memory", "tanh"], story)
    assert [*tmp_path.iterdir()] == [folder]
    assert found["launch"].values and found["tanh"].values
    assert found["memory"] == Found((), f"process 1 of 2 ended with code {code}")
    assert f"  memory: process 1 of 2 ended with code {code}" in talk


def test_a_complaint_about_a_peer_is_no_cause(tmp_path: Path) -> None:
    """Whichever of the two lines is the last: the other process may write later."""
    peer = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    log = tmp_path / "log"

    def told(*lines: str) -> str:
        log.write_text("\n".join(lines))
        return workers._last(log)

    killed, failed = (f"process 1 of 2 ended with code {code}" for code in (-9, 1))
    assert told(killed, peer) == told(peer, killed) == killed
    assert told("no such thing", failed, peer) == f"{failed}: no such thing"
    assert told(peer) == "the processes that measure ended"


@pytest.mark.long  # the next but one tells the same story to the command line
def test_what_hangs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "GRACE", 0.0)
    monkeypatch.setitem(measuring.SECONDS, "memory", 0.2)
    found, _ = measure(monkeypatch, ["launch", "memory", "tanh"], HANGS)
    assert found["memory"] == Found((), "out of time: memory took more than 1 s")
    assert found["launch"].values


def test_what_torch_cannot_do_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process alone, which has nobody to meet."""
    found, _ = measure(monkeypatch, ["bf16", "tanh"], CANNOT, processes=1)
    assert found["bf16"] == Found((), "not implemented for 'BFloat16'")
    assert found["tanh"].values


@pytest.mark.long
def test_a_plan_is_made_whatever_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same story, told to the command line; the next plan measures what has failed."""
    autopipe = Shell(tmp_path, monkeypatch, capsys)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(workers, "GRACE", 0.0)
    monkeypatch.setattr(workers, "COMMAND", workers.command(QUICK + HANGS + "measuring.main()"))
    said = autopipe("plan", "net.py", "--cluster", "local:2")
    assert (said.code, said.out) == (0, "plan.json\n")
    why = "memory: out of time: memory took more than 1 s; this process alone took a quick look"
    (line,) = (line for line in said.err.splitlines() if line.startswith("rough"))
    assert why in line
    rough = Plan.load(tmp_path / "plan.json").cluster.devices[0].rough
    assert why in rough
    monkeypatch.setattr(workers, "COMMAND", workers.command(QUICK + "measuring.main()"))
    said = autopipe("plan", "net.py", "--cluster", "local:2")
    assert "memory: " in said.err and "fp32: " not in said.err.split("rough")[0]


@pytest.mark.long
def test_gpus_are_hidden_from_what_measures_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The story tells what it sees as the sentence with which it ends."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    story = "import os; sys.exit(f\"sees {os.environ['CUDA_VISIBLE_DEVICES'] or 'none'}\")\n"
    monkeypatch.setattr(workers, "COMMAND", workers.command(story))
    sees = []
    for cpu in (False, True):
        found = workers.measure(LocalSpec(2, cpu), ["fp32"], None, lambda line: None)
        sees.append(found["fp32"].rough.rpartition(": ")[2])
    assert sees == ["sees 0", "sees none"]


def test_processes_that_never_begin_are_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; sys.exit('no torch')"
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, "-c", program))
    talk: list[str] = []
    found = workers.measure(LocalSpec(2), ["fp32", "tanh"], 16.0, talk.append)
    why = "the processes that measure ended: no torch"
    assert found == {"fp32": Found((), why), "tanh": Found((), why)}
    assert talk[1:] == [f"  fp32, tanh: {why}"]


def test_without_a_temporary_folder_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(workers.tempfile, "TemporaryDirectory", full)
    found, _ = measure(monkeypatch, ["fp32"])
    why = "no process can be started to measure it: [Errno 28] No space left on device"
    assert found == {"fp32": Found((), why)}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_ctrl_c_leaves_no_process_and_no_record(tmp_path: Path) -> None:
    """While every process hangs in a figure."""
    program = (
        "from autopipe.runtime.probe import probe, workers\n"
        f"workers.COMMAND = workers.command({HANGS + 'measuring.main()'!r})\n"
        "probe.local_cluster(probe.this_machine(2), lambda line: print(line, flush=True))\n"
    )
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    child = subprocess.Popen(
        [sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, preexec_fn=_hears_ctrl_c,
    )  # fmt: skip
    assert child.stdout is not None
    with child:
        next(line for line in child.stdout if "fp32" in line)
        assert len(_processes(str(tmp_path))) == 3
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=20) != 0
    deadline = time.monotonic() + 5
    while _processes(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _processes(str(tmp_path)) == [] and [*tmp_path.iterdir()] == []


def _hears_ctrl_c() -> None:
    """Jobs in the background of a shell, as tests may be, start processes that ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _processes(word: str) -> list[str]:
    """The numbers of processes with this word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_text():
                found.append(path.parent.name)
        except OSError:  # it has ended meanwhile
            pass
    return found


@pytest.mark.parametrize(
    ("processes", "cores", "words"),
    [
        (4, 2, "4 processes share 2 cores"),
        (4, 1, "4 processes share 1 core"),
        (4, 4, "4 processes with a core each"),
        (2, 64, "2 processes with 32 cores each"),
        (1, 1, "one process on 1 core"),
    ],
)
def test_processes_that_share_cores_are_told(
    processes: int, cores: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "cores", lambda: cores)
    assert workers._heading(processes, 5.2) == f"measuring this machine, about 8 s: {words}"


@pytest.mark.parametrize(
    ("text", "lacking"),
    [
        ("flags\t\t: fpu avx2\n", True),
        ("flags\t\t: fpu avx512_bf16\n", False),
        ("Features\t: fp asimd bf16\n", False),
        ("model name\t: unknown\n", False),
    ],
)
def test_a_processor_without_bf16(
    text: str, lacking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert workers.lacks("bf16") is lacking
    assert not workers.lacks("fp32")
    told = [*workers._lines({"bf16": Found((4e8,), "out of time after 4 x 4 x 4")})]
    words = ", this processor has no bf16 instructions" if lacking else ""
    rough = ", rough: out of time after 4 x 4 x 4"
    assert told == [f"matmuls in bf16: 0.4 GFLOP/s a process{words}{rough}"]


def test_everything_fits_into_fifteen_seconds() -> None:
    names = figures(EVERYTHING, 4, False)
    budgets = sum(measuring.budget(group) for group in measuring.groups(names))
    assert budgets + workers.LOADING <= 15
