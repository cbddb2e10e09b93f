"""Start the ranks of a run on this machine: each is a process that runs the same command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING

from autopipe.terminal.console import tell

if TYPE_CHECKING:
    from autopipe.planfile.contents import Plan
    from autopipe.runtime.launch.pods import Pod
    from autopipe.runtime.launch.world import World


def world_here(local: int | None) -> World | None:
    """This process among those of a launcher; None: no launcher has started it.

    One that a launcher has started alone, as the shell of `srun --pty bash`, is as if none had
    where `--local` asks for several: it starts them, and each of them is one of several.

    Args:
        local: the number of `--local`.
    """
    from autopipe.runtime.launch.world import world_from

    world = world_from(os.environ)
    alone = world is not None and world.size == 1 < (local or 1)
    return None if alone else world


def start_local(processes: int, forwarded: Sequence[Signals], log_dir: Path | None) -> int:
    """Start all ranks of a run, as `--local` asks; returns the code that they end with.

    Args:
        forwarded: signals that the ranks get to hear, and end by themselves.
        log_dir: a folder for each rank's output.
    """
    from autopipe.runtime.launch import spawn

    return spawn.spawn(processes, sys.argv[1:], forwarded=forwarded, log_dir=log_dir)


def start_pod(pod: Pod, plan: Plan, forwarded: Sequence[Signals], log_dir: Path | None) -> int:
    """Start the ranks of a pod, as `start_local` those of a machine."""
    from autopipe.runtime.launch import address, pods, spawn

    environs = pods.environments(pod, plan.mesh.processes_per_node)
    address.resolve(pod.master_addr, pods.PATIENCE, tell)
    return spawn.spawn(
        len(environs), sys.argv[1:], environs=environs, forwarded=forwarded, log_dir=log_dir
    )


def check(local: int | None, world: World | None, plan: Plan, path: Path) -> None:
    """Refuse a plan for another number of processes than `--local`'s or the launcher's.

    Args:
        local: the number of `--local`.
        world: this process among those of a launcher; None: no launcher has started it.
        path: the plan's.

    Raises:
        LaunchError: names both numbers.
    """
    from autopipe.runtime.launch.world import World, check_world

    if local is not None or world is None:
        world = World(0, local or 1, 0, local or 1, 0, "", 0)
    check_world(world, len(plan.mesh.places), str(path))
