"""Chooses the one rank that prints an error which several ranks have raised.

    before there is a watchdog      rank 0; another rank, if rank 0 has found nothing wrong; on a
                                    node that has no address for rank 0's host, its first rank
    under a watchdog                the rank that the watchdog's verdict names

The other ranks print nothing and exit with the same code.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from autopipe.errors import AutopipeError, LaunchError
from autopipe.runtime.launch import watchdog
from autopipe.runtime.launch.address import resolve
from autopipe.runtime.launch.world import World

TURN = 5.0
"""Seconds that a rank gives rank 0 to print the same error first; the launcher then ends it."""

LATEST = 30.0
"""Seconds after which a rank no longer expects rank 0 to pass its own checks."""


def code(error: Exception) -> int:
    """The exit code for an error: 2 for an `AutopipeError`, which a user can mend; 1 for others."""
    return 2 if isinstance(error, AutopipeError) else 1


def who() -> str:
    """The first words of a message on ranks other than the first, `rank 3: `; else ""."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return "" if rank == "0" else f"rank {rank}: "


@contextmanager
def one_voice(world: World | None, *, debug: bool = False) -> Iterator[None]:
    """Within, an error passes if this rank is to print it, and else ends the process silently.

    Args:
        world: this rank's place in the run; None: the process runs alone.
        debug: print the traceback of an error also where another rank prints the error.

    Raises:
        SystemExit: there was an error, and another rank prints it.
    """
    try:
        yield
    except Exception as error:
        if world is None or _speaks(error, world):
            raise
        if debug:
            traceback.print_exc()
        sys.exit(code(error))


def _speaks(error: Exception, world: World) -> bool:
    """Whether this rank is the one that prints an error."""
    found = watchdog.verdict(error)
    if found is not None:
        return found.rank == world.rank
    from torch import distributed  # a rank that is in a run has it already

    if world.rank == 0 or distributed.is_initialized():
        return True
    if not _knows(world.master_addr):
        return world.local_rank == 0
    # Before the start every rank finds most mistakes. Rank 0 then prints the error and ends; if it
    # listens for the others instead, it has found none, and this rank prints its own.
    time.sleep(TURN)
    deadline = time.monotonic() + LATEST - TURN
    while not (listens := _listens(world)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return listens


def _knows(host: str) -> bool:
    """Whether this host can resolve another host's name."""
    try:
        resolve(host)
    except LaunchError:
        return False
    return True


def _listens(world: World) -> bool:
    """Whether rank 0 has passed its own checks and listens for the other ranks."""
    try:
        socket.create_connection((world.master_addr, world.master_port), TURN).close()
    except OSError:
        return False
    return True
