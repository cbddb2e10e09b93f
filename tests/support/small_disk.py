"""A disk that is soon full: a small file system in memory, mounted for a test.

    with small_disk(tmp_path / "disk", 64 * KIB) as disk:
        fill(disk, leaving=8 * KIB)

It needs Linux and the right to mount; `why_not` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KIB = 1024

PAGE = 4 * KIB
"""What such a file system hands out at a time."""

BALLAST = "ballast"


def why_not() -> str | None:
    """Why there can be no such disk here; None: there can."""
    if sys.platform != "linux" or shutil.which("mount") is None or shutil.which("unshare") is None:
        return "file systems in memory are Linux's, mounted by `mount`"
    if os.geteuid() != 0:
        return "only root may mount"
    # In a namespace of its own, which ends with the command: nothing is left mounted.
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True, text=True,
    )  # fmt: skip
    return tried.stderr.strip() or None if tried.returncode else None


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A disk of `size` bytes at `folder`, which is made."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def free(disk: Path) -> int:
    """Bytes that are left."""
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def fill(disk: Path, leaving: int = 0) -> None:
    """Fill a disk up to so many bytes, with one file; what an earlier call wrote is let go of."""
    ballast = disk / BALLAST
    ballast.unlink(missing_ok=True)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free(disk) - leaving)
