"""What Slurm's environment variables say in its own short forms: tasks of nodes, lists of nodes."""

from __future__ import annotations

import re
import subprocess

from autopipe.errors import LaunchError
from autopipe.runtime.launch.address import resolve


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node, from Slurm's short form: "2(x2),1" -> [2, 2, 1].

    Raises:
        LaunchError: `text` has another form.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise LaunchError(f"tasks per node of a Slurm step: expected '2(x2),1', found {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_address(nodelist: str) -> str:
    """The address of the first node of Slurm's list.

    It is the node's name if this resolves, as it usually does. If not (containers, several nodes on
    one host), it is the NodeAddr of Slurm's configuration.

    Raises:
        LaunchError: scontrol is missing or fails.
    """
    name = _scontrol("show", "hostnames", nodelist).split()[0]
    try:
        resolve(name)
    except LaunchError:
        found = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", name))
        return found[1] if found else name
    return name


def _scontrol(*arguments: str) -> str:
    command = ("scontrol", *arguments)
    try:
        return subprocess.check_output(command, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"no address of the first node: `{' '.join(command)}` failed: {error}",
            hint="export MASTER_ADDR, the address of the first node, before srun",
        ) from error
