"""The launchers by name: which function writes for each, and which words it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from autopipe.errors import AutopipeError
from autopipe.export import words as letters
from autopipe.export.job import Launch, job_of
from autopipe.export.jobset import job_set
from autopipe.export.kubeflow import pytorch_job, train_job
from autopipe.export.slurm import script as slurm_script
from autopipe.export.torchrun import script as torchrun_script
from autopipe.export.words import Words
from autopipe.planfile.contents import Plan


@dataclass(frozen=True)
class Launcher:
    """A launcher.

    Attributes:
        write: makes the text.
        takes: names of the words that it takes, besides those that all launchers take.
        program: whether the text is a program, and not a manifest.
    """

    write: Callable[[Launch], str]
    takes: frozenset[str]
    program: bool = False


_ALL = {"name", "run", "checkpoints", "save_every", "keep", "interface"}
_POD = {"image", "namespace", "claim", "folder", "cpus", "memory", "time_limit"}
_SLURM = {"time_limit", "partition", "account", "qos", "constraint", "array", "style", "image"}

LAUNCHERS = {
    "torchrun": Launcher(
        torchrun_script, frozenset(_ALL | {"hosts", "port", "restarts", "venv"}), program=True
    ),
    "slurm": Launcher(
        slurm_script,
        frozenset(_ALL | _SLURM | {"cpus", "memory", "port", "restarts", "venv"}),
        program=True,
    ),
    "kubeflow": Launcher(train_job, frozenset(_ALL | _POD)),
    "pytorchjob": Launcher(pytorch_job, frozenset(_ALL | _POD | {"restarts"})),
    "jobset": Launcher(job_set, frozenset(_ALL | _POD | {"port", "restarts"})),
}
"""Kubeflow's newer kind of job is called by its name."""


def export(plan: Plan, target: str, path: str, words: Words) -> str:
    """The script or manifest that starts `plan` by one of `LAUNCHERS`.

    Args:
        path: the path of the plan's file, as the nodes find it.

    Raises:
        AutopipeError: a word is none of the target's, or holds what a script may not; or the target
            cannot start this plan.
    """
    letters.check(words)
    launcher = LAUNCHERS[target]
    for field in fields(words):
        given = getattr(words, field.name) != field.default
        if given and field.name not in launcher.takes:
            others = [name for name, of in LAUNCHERS.items() if field.name in of.takes]
            raise AutopipeError(
                f"{letters.option(field.name)} has no meaning for {target}; "
                f"it is an option of {', '.join(others)}"
            )
    return launcher.write(job_of(plan, path, words))
