"""`--local N` starts N processes, reports how each ended, and leaves none behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autopipe.errors import LaunchError
from autopipe.runtime.launch import spawn as processes
from autopipe.runtime.launch.spawn import spawn

ROOT = Path(__file__).parents[3]


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Every process leaves its id in the folder, and waits there until the others have.
MEET = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
{before}
(folder / f"{{rank}}.part").write_text(str(os.getpid()))
(folder / f"{{rank}}.part").rename(folder / f"{{rank}}.pid")
while len(list(folder.glob("*.pid"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
{after}
time.sleep(60)
"""


def program(after: str = "", before: str = "") -> tuple[str, ...]:
    return (sys.executable, "-c", MEET.format(before=before, after=after))


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid"))]


def test_what_each_process_finds_in_its_environment(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    script = (
        "import os; from autopipe.runtime.launch.world import world_from;"
        "world = world_from(os.environ);"
        "line = f'{world.rank} {world.size} {world.local_rank} {world.local_size} {world.node}';"
        "line += f' {world.master_addr} {os.environ[\"OMP_NUM_THREADS\"]}\\n';"
        "os.write(1, line.encode())"  # in one piece: the other process writes to the same pipe
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert spawn(2, [], command=(sys.executable, "-c", script)) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "0 2 0 2 0 127.0.0.1 3",
        "1 2 1 2 0 127.0.0.1 3",
    ]


def test_a_users_file_of_the_name_of_one_of_pythons_own(tmp_path: Path) -> None:
    """Bug: `autopipe plan` went well beside a `logging.py`, as a program finds no modules in the
    current folder, and the ranks of `autopipe run` imported it and ended."""
    folder, programs = tmp_path / "users", tmp_path / "bin"
    folder.mkdir(), programs.mkdir()
    (folder / "logging.py").write_text("1 / 0")
    (programs / "program.py").write_text(
        "from autopipe.runtime.launch.spawn import spawn\nraise SystemExit(spawn(1, ['--version']))"
    )
    found = subprocess.run(
        [sys.executable, programs / "program.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("autopipe")


@linux
def test_the_code_of_the_one_that_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert spawn(3, [str(tmp_path)], command=program("if rank == 1: sys.exit(7)")) == 7
    assert capfd.readouterr().err == "rank 1 of 3 exited with code 7; ending the others\n"
    assert [alive(pid) for pid in pids(tmp_path)] == [False] * 3


@linux
def test_the_signal_that_killed_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    killed = program("if rank == 2: os.kill(os.getpid(), signal.SIGKILL)")
    assert spawn(3, [str(tmp_path)], command=killed) == 128 + 9
    assert capfd.readouterr().err == (
        "rank 2 of 3 was killed by signal 9 (Killed); ending the others\n"
    )
    assert [alive(pid) for pid in pids(tmp_path)] == [False] * 3


@linux
def test_who_was_ended_is_not_to_blame(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A watchdog ends a rank with SIGTERM because of another one, which takes longer to end."""
    after = (
        "if rank == 0: os.kill(os.getppid(), signal.SIGSTOP); os.kill(os.getpid(), signal.SIGTERM)"
        "\nif rank == 1: time.sleep(0.3); sys.exit(3)"
    )
    script = (
        "import sys; from autopipe.runtime.launch.spawn import spawn;"
        "sys.exit(spawn(2, sys.argv[1:2], command=sys.argv[2:]))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), *program(after)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    wait_until(lambda: len(pids(tmp_path)) == 2 and not any(map(alive, pids(tmp_path))))
    parent.send_signal(signal.SIGCONT)  # it finds both at once
    assert parent.wait(timeout=20) == 3
    assert capfd.readouterr().err == "rank 1 of 2 exited with code 3; ending the others\n"


@linux
def test_one_that_is_stopped_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """It would take its SIGTERM only when it goes on."""
    stopped = "if rank == 0: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(0.5); sys.exit(1)"
    began = time.monotonic()
    assert spawn(2, [str(tmp_path)], command=program(stopped)) == 1
    assert time.monotonic() - began < processes.GRACE
    assert [alive(pid) for pid in pids(tmp_path)] == [False] * 2


@linux
def test_what_a_process_leaves_behind(tmp_path: Path) -> None:
    """A data loader, a sidecar: they are of its group, and gone with it."""
    left = "import subprocess; child = subprocess.Popen(['sleep', '60'])\n"
    left += "(folder / 'left.pid').write_text(str(child.pid)); sys.exit(0)"
    assert spawn(1, [str(tmp_path)], command=program(left)) == 0
    assert len(pids(tmp_path)) == 2
    assert [alive(pid) for pid in pids(tmp_path)] == [False] * 2


@linux
def test_one_that_does_not_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE", 0.2)
    deaf = program("if rank == 0: sys.exit(1)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    assert spawn(2, [str(tmp_path)], command=deaf) == 1
    assert [alive(pid) for pid in pids(tmp_path)] == [False] * 2


@linux
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_nobody_outlives_the_parent(tmp_path: Path, number: int, code: int) -> None:
    """Asked to end, or killed on the spot: then the kernel ends the children in its stead."""
    script = (
        "import sys; from autopipe.runtime.launch.spawn import spawn;"
        "sys.exit(spawn(2, sys.argv[1:2], command=sys.argv[2:]))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), *program()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        wait_until(lambda: len(pids(tmp_path)) == 2)
        assert all(alive(pid) for pid in pids(tmp_path))
        parent.send_signal(number)
        assert parent.wait(timeout=20) == code
        wait_until(lambda: not any(alive(pid) for pid in pids(tmp_path)))
    finally:
        parent.kill()


@linux
@pytest.mark.parametrize("patient", [True, False])
def test_ctrl_c_of_a_run_that_saves(patient: bool, tmp_path: Path) -> None:
    """The first one is handed on, and processes end by themselves; the second one ends them."""
    script = (
        "import signal, sys; from autopipe.runtime.launch.spawn import spawn;"
        "saves = (signal.SIGTERM, signal.SIGINT);"
        "sys.exit(spawn(2, sys.argv[1:2], command=sys.argv[2:], forwarded=saves))"
    )
    told = "signal.signal(signal.SIGINT, lambda *_: (folder / f'{rank}.told').touch())"
    ends = "signal.pause(); time.sleep(0.2); (folder / f'{rank}.saved').touch(); sys.exit(0)"
    argv = program(before=told, after=ends if patient else "signal.pause()")
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: len(pids(tmp_path)) == 2)
    time.sleep(0.1)  # until both pause
    parent.send_signal(signal.SIGINT)
    wait_until(lambda: len([*tmp_path.glob("*.told")]) == 2)
    if not patient:
        parent.send_signal(signal.SIGINT)
    err = parent.communicate(timeout=20)[1]
    assert parent.returncode == 130
    assert err == (
        "Ctrl-C: the run saves after this step and stops; press it again to end at once\n"
    )
    assert len([*tmp_path.glob("*.saved")]) == (2 if patient else 0)
    assert not any(map(alive, pids(tmp_path)))


def test_handlers_are_put_back() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    assert spawn(1, [], command=(sys.executable, "-c", ""), forwarded=numbers) == 0
    assert [signal.getsignal(number) for number in numbers] == before


def test_no_processes() -> None:
    with pytest.raises(LaunchError, match="at least 1 local process, found 0"):
        spawn(0, [])


def test_two_programs_of_one_seed_find_ports_of_their_own() -> None:
    """Both at once took one port, and the later one's rank 0 could not listen there."""

    def found() -> list[int]:
        random.seed(0)
        return [processes.free_port() for _ in range(3)]

    assert found() != found()
