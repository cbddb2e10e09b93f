"""The progress of long work: lines of text, and bars on a terminal."""

import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopipe.terminal import bars, console
from autopipe.util.progress import phase, shown
from autopipe.util.seeding import alike, places


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two seconds are a tenth of one here, and five are a quarter."""
    monkeypatch.setattr(bars, "SOON_SECONDS", 0.1)
    monkeypatch.setattr(bars, "AGAIN_SECONDS", 0.25)
    monkeypatch.delenv("RANK", raising=False)
    console.forget()
    yield
    assert not [thread for thread in threading.enumerate() if "_tell" in thread.name]


def test_what_ends_soon_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with bars.showing():
        for _ in range(20):
            with phase("tracing"):
                time.sleep(0.01)
    assert capsys.readouterr().err == ""


def test_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """At 0.1 s, 0.35 s and 0.6 s of 0.7 s; fewer on a busy machine."""
    with bars.showing(), phase("measuring", of=4) as done:
        done()
        time.sleep(0.7)
        done(3)
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 3
    for line in lines:
        assert re.fullmatch(r"measuring: 1 of 4, \d s so far, about \d s left", line), line


def test_of_phases_in_each_other_the_innermost_long_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with bars.showing(), phase("costs"):
        for _ in range(6):
            with phase("a moment"):
                time.sleep(0.03)
        with phase("counting"):
            time.sleep(0.5)
    names = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert set(names) <= {"costs", "counting"} and names[-1] == "counting"


def test_what_is_said_of_time() -> None:
    begun = bars._Phase("search", of=8, parts=2, begun=100.0)
    assert begun.line(106.0) == "search: 2 of 8, 6 s so far, about 18 s left"
    assert bars._Phase("search", of=8, begun=0.0).line(3.0) == "search: 0 of 8, 3 s so far"
    assert bars._Phase("tracing", of=None, begun=0.0).line(12.2) == "tracing: 12 s so far"
    searched = bars._Phase("search", of=None, parts=171, begun=0.0)
    assert searched.line(3.0) == "search: 171 done, 3 s so far"


@pytest.mark.parametrize("kind", [bars.Lines, bars.Bars])
def test_a_long_phase_says_where_the_users_code_is(
    kind: type[bars.Lines | bars.Bars],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop over a thousand tokens takes minutes to trace: whose loop it is can be seen."""
    monkeypatch.setattr(bars, "LONG_SECONDS", 0.1)
    monkeypatch.setenv("FORCE_COLOR", "1")
    (tmp_path / "slow.py").write_text("import time\n\ndef model():\n    time.sleep(0.6)\n")
    spec = importlib.util.spec_from_file_location("slow", tmp_path / "slow.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with shown(by := kind()):
        with phase("tracing"):
            alike(module.model, places())()
        with phase("searching"):
            time.sleep(0.6)
    by.close()
    said = capsys.readouterr().err
    assert "at slow.py:4" in said and "test_bars.py" not in said


@pytest.mark.parametrize("rank", ["1", "7"])
def test_of_many_ranks_the_first_one_speaks(
    rank: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    with bars.showing(), phase("loading"):
        time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal() -> None:
    """What a terminal is sent: the name, the parts, and at the end the line is wiped."""
    pty = pytest.importorskip("pty")
    code = (
        "import time\n"
        "from autopipe.terminal import bars, console\n"
        "from autopipe.util.progress import phase\n"
        "bars.SOON_SECONDS = 0.1\n"
        "with bars.showing(), phase('measuring', of=12) as done:\n"
        "    done(5); time.sleep(0.6); console.say('a line of talk'); time.sleep(0.3)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm", COLUMNS="100")
        os.execv(sys.executable, [sys.executable, "-c", code])
    said = b""
    while True:
        try:
            more = os.read(terminal, 65536)
        except OSError:  # its other end is closed
            break
        if not more:
            break
        said += more
    os.waitpid(pid, 0)
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    assert "measuring" in text and "5 of 12" in text and "a line of talk\r\n" in text
    assert said.endswith((b"\x1b[2K\x1b[?25h", b"\x1b[2K\x1b[?25h\r")), said[-80:]
