"""Copies the output of each rank into a file of its own, and passes it on to the terminal.

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
"""Seconds to wait for the last output of ended ranks: a process that a rank has started may still
hold the rank's pipe open."""

LONGEST = 65536
"""Bytes of a line at most; a longer line is copied in parts, before it has ended."""

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""Environment of a child whose output is copied, so that the log has its last lines if it dies."""


class Logs:
    """The files of a folder, `rank-0.log` and so on; a run appends to the files of earlier runs.

    Args:
        folder: where the files are; made if it does not exist.

    Raises:
        LaunchError: the folder cannot be made.
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
        """The file with a rank's output."""
        return self._folder / f"rank-{rank}.log"

    def follow(self, rank: str, child: subprocess.Popen[bytes]) -> None:
        """Begin to copy a child's output, in threads that end with the child.

        Args:
            rank: the child's rank, which names the file.
            child: started with pipes for stdout and stderr.

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
        """Copy what is left in the pipes, and close the files; the children have ended."""
        for thread in self._threads:
            thread.join(PATIENCE)
        for log in self._files:
            log.close()


def _copy(source: IO[bytes], targets: list[FileIO]) -> None:
    """Copy lines to the targets; drop a target that fails, so that a full disk stops no child."""
    with source:
        while line := source.readline(LONGEST):  # whole lines: stdout and stderr share the log
            for target in [*targets]:
                try:
                    target.write(line)
                except (OSError, ValueError):  # the terminal is gone, the disk full, the log closed
                    targets.remove(target)
