"""Files are whole or not there."""

import os
import sys
from pathlib import Path

import pytest

from autopipe.errors import AutopipeError
from autopipe.util import atomic_file


def test_text_and_bytes(tmp_path: Path) -> None:
    for data in ("süß\n", "süß\n".encode()):
        atomic_file.write(data, tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == "süß\n".encode()


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    """Bug: the link was replaced, by a plan whose path to its model began at the link's target."""
    (tmp_path / "runs").mkdir()
    link, file = tmp_path / "link", tmp_path / "runs" / "file"
    link.symlink_to(file)
    for data in ("new", "newer"):
        atomic_file.write(data, link)
        assert link.is_symlink() and file.read_text() == data


def test_what_is_no_file_stays(tmp_path: Path) -> None:
    """Bug: of root, `-o /dev/null` made a file in the place of the device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    atomic_file.check_folder(pipe)
    atomic_file.write("text", pipe)
    assert os.read(reading, 9) == b"text" and pipe.is_fifo()
    os.close(reading)


def test_a_disk_that_is_full_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AutopipeError, match="No space left on device\nhint: make room on its"):
        atomic_file.write("new", path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_limit_on_the_size_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the hint asked whether the folder was there."""

    def too_large(descriptor: int) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "fsync", too_large)
    with pytest.raises(AutopipeError, match="File too large\nhint: `ulimit -f` says how large"):
        atomic_file.write("new", tmp_path / "file")


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(AutopipeError, match="Is a directory\nhint: it is a folder: name a file"):
        atomic_file.write("new", tmp_path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AutopipeError, match="cannot be written: No such file or directory"):
        atomic_file.write("", tmp_path / "nowhere" / "file")
    with pytest.raises(AutopipeError) as error:
        atomic_file.check_folder(tmp_path / "no where" / "file")
    assert error.value.hint == f"mkdir -p '{tmp_path / 'no where'}'"


# --- what is asked before long work


@pytest.mark.skipif(sys.platform != "linux", reason="/proc takes no files, not even root's")
def test_a_place_that_takes_no_files(tmp_path: Path) -> None:
    with pytest.raises(AutopipeError, match="^/proc/m.safetensors cannot be written: no file "):
        atomic_file.check_model(Path("/proc/m.safetensors"))
    with pytest.raises(AutopipeError, match="made in /proc: No such file or directory"):
        atomic_file.check_new_folder(Path("/proc/kept/there"), "--checkpoints")


def test_a_place_that_takes_files(tmp_path: Path) -> None:
    """Nothing is left there."""
    atomic_file.check_folder(tmp_path / "file")
    atomic_file.check_new_folder(tmp_path / "kept" / "there", "--checkpoints")
    atomic_file.check_new_folder(tmp_path, "--checkpoints")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_a_folder_is_told_as_of_the_folder_that_was_asked_for(tmp_path: Path) -> None:
    """Bug: the name of the folder beside was told, which is gone by then."""
    path = tmp_path / "out"
    with pytest.raises(AutopipeError) as error, atomic_file.folder(path) as beside:
        atomic_file.write("text", beside / "no where" / "file")
    assert error.value.message == f"{path} cannot be written: No such file or directory"
    other = AutopipeError("of another thing")
    with pytest.raises(AutopipeError, match="^of another thing$"), atomic_file.folder(path):
        raise other from OSError(2, "of another file")
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_a_folder_is_to_be(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(AutopipeError, match="^--checkpoints .*: expected a folder, found a file"):
        atomic_file.check_new_folder(path, "--checkpoints")
    with pytest.raises(AutopipeError, match=f"expected a folder at {path}, found a file"):
        atomic_file.check_new_folder(path / "kept", "--checkpoints")
    # Bug: the hint was to make a folder, by a command that fails here.
    with pytest.raises(AutopipeError, match="cannot be written: expected a folder at") as error:
        atomic_file.check_folder(path / "plan.json")
    assert error.value.hint == "name a path in another folder"
