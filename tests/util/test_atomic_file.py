"""Files are whole or not there."""

import os
from pathlib import Path

import pytest

from autopipe.errors import AutopipeError
from autopipe.util import atomic_file


def test_text_and_bytes(tmp_path: Path) -> None:
    for data in ("süß\n", "süß\n".encode()):
        atomic_file.write(data, tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == "süß\n".encode()


def test_a_disk_that_is_full_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AutopipeError, match="file cannot be written: No space left on device"):
        atomic_file.write("new", path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AutopipeError, match="cannot be written: No such file or directory"):
        atomic_file.write("", tmp_path / "nowhere" / "file")
