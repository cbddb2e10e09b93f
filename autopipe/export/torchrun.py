"""A script that starts a plan with torchrun, on each node by its number: static rendezvous.

torchrun's other rendezvous, c10d, counts nodes by the text of their addresses; a plan that binds
ranks to places would run elsewhere than planned.
"""

from __future__ import annotations

from autopipe.errors import AutopipeError
from autopipe.export.job import Launch
from autopipe.export.links import advice, settings
from autopipe.export.template import shell
from autopipe.util.numbers import count
from autopipe.util.version import VERSION

PORT = 29500
"""torchrun's own default for where rank 0 listens."""


def script(job: Launch) -> str:
    """The script, for all nodes.

    Raises:
        AutopipeError: hosts were named, and they are not as many as the plan's nodes.
    """
    words = job.words
    if words.hosts and len(words.hosts) != job.nodes:
        raise AutopipeError(
            f"--hosts: the plan has {count(job.nodes, 'node')}, found "
            f"{count(len(words.hosts), 'host')}",
            hint="one for each node, in the plan's order, with commas between",
        )
    return shell(
        "torchrun.sh",
        title=job.title,
        version=VERSION,
        nodes=job.nodes,
        counts=job.processes,
        path=job.path,
        hosts=words.hosts,
        port=words.port or PORT,
        restarts=words.starts_again,
        venv=words.venv,
        saves=words.checkpoints is not None,
        settings=settings(job),
        advice=advice(job),
        logs=f"logs/{words.name}",
        command=job.command,
    )
