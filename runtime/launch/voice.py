"""Chooses the one rank that prints an error which several ranks have raised.

    before there is a watchdog      rank 0; another rank, if rank 0 has found nothing wrong;
                                    the first of a node that cannot find rank 0's
    under a watchdog                the rank that its verdict names

The others end without a word, with the same code.
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
"""Seconds that a rank leaves rank 0 to tell the same mistake first; a launcher then ends it."""

LATEST = 30.0
"""Seconds after which rank 0 has come through its own checks, if it ever does."""


def code(error: Exception) -> int:
    """What a process ends with: 2 for a mistake of the user's, 1 for anything else."""
    return 2 if isinstance(error, AutopipeError) else 1


def who() -> str:
    """What a sentence begins with on a launcher's ranks other than the first: `rank 3: `."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return "" if rank == "0" else f"rank {rank}: "


@contextmanager
def one_voice(world: World | None, *, debug: bool = False) -> Iterator[None]:
    """Let through an error in the block where it is for this rank to tell.

    Args:
        world: who this rank is; None: alone.
        debug: show where the others have met it.

    Raises:
        SystemExit: another rank tells it.
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
    """Whether it is for this rank to tell an error."""
    found = watchdog.verdict(error)
    if found is not None:
        return found.rank == world.rank
    from torch import distributed  # a rank that is in a run has it already

    if world.rank == 0 or distributed.is_initialized():
        return True
    if not _knows(world.master_addr):
        return world.local_rank == 0
    # Most mistakes of this early hour are found by every rank. Rank 0 tells them: it does not wait
    # for the others then.
    time.sleep(TURN)
    deadline = time.monotonic() + LATEST - TURN
    while not (listens := _listens(world)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return listens


def _knows(host: str) -> bool:
    """Whether this host can tell the address of another one."""
    try:
        resolve(host)
    except LaunchError:
        return False
    return True


def _listens(world: World) -> bool:
    """Whether rank 0 has come through its own checks, and waits for the others."""
    try:
        socket.create_connection((world.master_addr, world.master_port), TURN).close()
    except OSError:
        return False
    return True
