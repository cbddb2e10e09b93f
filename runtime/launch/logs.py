"""Copies what ranks print into a file each, while it goes on to the terminal.

rank 3, stdout  --pipe-->  a thread  --+-->  FOLDER/rank-3.log
rank 3, stderr  --pipe-->  a thread  --+-->  stdout or stderr of the parent
"""

from __future__ import annotations

import subprocess
from io import FileIO
from pathlib import Path
from threading import Thread
from typing import IO

from autopipe.errors import LaunchError

PATIENCE = 5.0
"""Seconds for the rest of what ended ranks have printed: a process that they left behind may hold
their pipe open."""

LONGEST = 65536
"""Bytes of a line that are waited for before they are copied."""

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""For a child whose output is copied: what it printed last before it died is in its log too."""


class Logs:
    """The files of a folder, `rank-0.log` and so on; lines of earlier runs stay.

    Args:
        folder: is made if it is not there.

    Raises:
        LaunchError: it cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads: list[Thread] = []
        self._files: list[FileIO] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"--log-dir {folder} cannot be made: {error.strerror}",
                hint="name a folder, or a place for one in which you may write",
            ) from error

    def path(self, rank: str) -> Path:
        """Where a rank's output is."""
        return self._folder / f"rank-{rank}.log"

    def follow(self, rank: str, child: subprocess.Popen[bytes]) -> None:
        """Copy what a child prints from now on, until its end.

        Raises:
            LaunchError: the rank's file cannot be written.
        """
        try:
            log = FileIO(self.path(rank), "ab")
        except OSError as error:
            raise LaunchError(f"{self.path(rank)} cannot be written: {error.strerror}") from error
        self._files.append(log)
        for source, terminal in ((child.stdout, 1), (child.stderr, 2)):
            assert source is not None, "the child was started with pipes"
            targets = [log, FileIO(terminal, "wb", closefd=False)]
            self._threads.append(Thread(target=_copy, args=(source, targets), daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        """Wait for the rest; the children have ended."""
        for thread in self._threads:
            thread.join(PATIENCE)
        for log in self._files:
            log.close()


def _copy(source: IO[bytes], targets: list[FileIO]) -> None:
    """Copy lines to each target as long as it takes them: a child never waits for a full disk."""
    with source:
        while line := source.readline(LONGEST):  # whole ones: its other stream has the same log
            for target in [*targets]:
                try:
                    target.write(line)
                except (OSError, ValueError):  # the terminal is gone, the disk full, the log closed
                    targets.remove(target)
