"""Which output of each rank `--log-dir` writes to files, beside the terminal."""

import sys
from pathlib import Path

import pytest

from autopipe.errors import LaunchError
from autopipe.runtime.launch.spawn import spawn

TALK = (
    sys.executable,
    "-c",
    "import os, sys; rank = os.environ['RANK']; print('data', rank);"
    "print('talk', rank, file=sys.stderr); {after}",
)


def talk(folder: Path, after: str = "") -> int:
    command = [word.format(after=after) for word in TALK]
    return spawn(2, [], command=command, log_dir=folder)


def test_each_rank_has_a_file_and_the_terminal_has_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made" / "logs"
    assert talk(folder) == 0
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == ["data 0", "data 1"]
    assert sorted(said.err.splitlines()) == ["talk 0", "talk 1"]
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.log", "rank-1.log"]
    for rank in (0, 1):
        lines = (folder / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(lines) == [f"data {rank}", f"talk {rank}"]


def test_the_last_words_of_a_rank_that_is_killed(tmp_path: Path) -> None:
    killed = "rank == '1' and os.kill(os.getpid(), 9)"
    assert talk(tmp_path, killed) == 128 + 9
    assert "data 1\n" in (tmp_path / "rank-1.log").read_text()


def test_the_lines_of_an_earlier_run_stay(tmp_path: Path) -> None:
    assert talk(tmp_path) == talk(tmp_path) == 0
    assert (tmp_path / "rank-0.log").read_text().count("data 0\n") == 2


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="file cannot be made: File exists"):
        talk(tmp_path / "file")
