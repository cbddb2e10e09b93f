"""A fork of `warm` looks from outside (codes, signals, output) like a process started by itself."""

import os
import sys
import time
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.shell import Said, ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")


def ended(code: str, folder: Path, processes: int = 1) -> Said:
    (folder / "code.py").write_text("import os, signal, sys, threading, time, torch\n" + code)
    return ranks(processes, "code.py", "argument", folder=folder)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("", Said(0, "", "")),
        ("sys.exit(3)", Said(3, "", "")),
        ("sys.exit('no disk')", Said(1, "", "no disk\n")),
        ("os._exit(5)", Said(5, "", "")),
        ("os.kill(os.getpid(), signal.SIGKILL)", Said(-9, "", "")),
        ("os.kill(os.getpid(), signal.SIGTERM)", Said(-15, "", "")),
        # What Python does at its end.
        ("import atexit; atexit.register(print, 'left')", Said(0, "left\n", "")),
        ("threading.Timer(0.1, print, ['later']).start()", Said(0, "later\n", "")),
    ],
)
def test_how_it_ends(code: str, expected: Said, tmp_path: Path) -> None:
    assert ended(code, tmp_path) == expected


def test_an_exception(tmp_path: Path) -> None:
    said = ended("1 / 0", tmp_path)
    assert said.code == 1 and said.err.endswith("\nZeroDivisionError: division by zero\n")


def test_what_it_finds(tmp_path: Path) -> None:
    """Its arguments, its folder, torchrun's variables, a session, and threads that backward needs.

    Ranks 0 and 1 hash strings by seeds of their own.
    """
    code = """
print(*sys.argv, os.path.basename(os.getcwd()), os.getsid(0) == os.getpid())
torch.ones(3, requires_grad=True).sum().backward()
open(os.environ['RANK'], 'w').write(f"{os.environ['WORLD_SIZE']} {hash('a')}")
"""
    assert ended(code, tmp_path, processes=2).out == f"code.py argument {tmp_path.name} True\n" * 2
    (two, one), (also_two, other) = ((tmp_path / rank).read_text().split() for rank in "01")
    assert two == also_two == "2" and one != other


def test_when_one_fails_the_others_end(tmp_path: Path) -> None:
    code = "open(os.environ['RANK'], 'w').write(str(os.getpid()))\n"
    code += "time.sleep(0.2)\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)"
    began = time.monotonic()
    assert ended(code, tmp_path, processes=3).code == 7
    assert time.monotonic() < began + 30
    for rank in "02":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / rank).read_text()), 0)


@pytest.mark.long
def test_a_parent_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)")
    parent = warm._Parent(tmp_path / "parent")
    with (tmp_path / "out").open("w") as out:
        request = {"argv": ["wait.py"], "environ": {}, "folder": str(tmp_path)}
        pid = parent.ask(request, out.fileno(), out.fileno())
    while not (tmp_path / "out").read_text():
        time.sleep(0.01)
    assert (process := parent._process) is not None, "nobody listened there"
    process.kill()
    process.wait()
    parent.close()
    ends(pid)


@pytest.mark.long
def test_a_parent_serves_all_who_ask_and_ends_with_the_last(tmp_path: Path) -> None:
    first, second = (warm._Parent(tmp_path / "parent") for _ in range(2))
    assert (process := first._process) is not None and second._process is None
    (tmp_path / "wait.py").write_text("import time; time.sleep(60)")
    request = {"argv": ["wait.py"], "environ": {}, "folder": str(tmp_path)}
    with open(os.devnull, "w") as nowhere:
        files = (nowhere.fileno(), nowhere.fileno())
        own, other = (parent.ask(request, *files) for parent in (first, second))
    first.close()  # and what was forked for it ends
    ends(own)
    assert second.ask({"poll": other}) is None, "it still runs"
    second.close()
    assert process.wait(20) == 0
    assert not (tmp_path / "parent").exists()


def ends(pid: int) -> None:
    state = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 20
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
