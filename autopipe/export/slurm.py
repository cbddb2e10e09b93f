"""A batch script for Slurm: a task a rank, or torchrun on each node; saved and requeued in time.

sbatch -- nodes --> this script on the first -- srun --> tasks, each `autopipe run`
  ^                        |
  +--- scontrol requeue ---+--- USR1 before the limit: all ranks save, and end with 0
"""

from __future__ import annotations

import shlex

from autopipe.errors import AutopipeError
from autopipe.export.job import Launch, check_alike
from autopipe.export.links import settings
from autopipe.export.template import shell
from autopipe.util.version import VERSION


def script(job: Launch) -> str:
    """The script.

    Raises:
        AutopipeError: nodes differ; or the time limit is shorter than it takes to save before it;
            or restarts are asked of srun.
    """
    check_alike(job, "Slurm")
    words = job.words
    style = words.style or "srun"
    if style == "srun" and words.restarts is not None:
        raise AutopipeError(
            f"--restarts {words.restarts}: srun starts no task again, torchrun does",
            hint="--style torchrun; or --checkpoints FOLDER, and Slurm requeues the job if a node "
            "fails",
        )
    tasks = job.processes[0] if style == "srun" else 1
    return shell(
        "slurm.sh",
        title=job.title,
        version=VERSION,
        path=job.path,
        asked=_options(job, tasks),
        venv=words.venv,
        style=style,
        port=words.port,
        settings=settings(job),
        saves=words.checkpoints is not None,
        processes=job.processes[0],
        restarts=words.starts_again,
        command=_command(job),
        each=_each(job),
        srun=_srun(job, tasks),
        log="rank-%t.log" if style == "srun" else "node-%n.log",
    )


def _options(job: Launch, tasks: int) -> dict[str, object]:
    """The options of sbatch, in its own names; None: one without a value."""
    words = job.words
    saves = words.checkpoints is not None
    if saves and words.time_limit and words.time_limit <= job.notice:
        raise AutopipeError(
            f"--time is {words.time_limit} s, and the last checkpoint begins {job.notice} s before",
            hint=f"ask for more than {job.notice // 60 + 1} minutes",
        )
    options: dict[str, object] = {
        "job-name": words.name,
        "nodes": job.nodes,
        "ntasks-per-node": tasks,
        "cpus-per-task": words.cpus or None,
        "gpus-per-node": job.devices[0] if job.gpu else None,
        "mem": words.memory.removesuffix("i") if words.memory else None,
        "time": _time(words.time_limit) if words.time_limit else None,
        "partition": words.partition,
        "account": words.account,
        "qos": words.qos,
        "constraint": f'"{words.constraint}"' if words.constraint else None,
        "array": words.array,
        "output": "%x-%A_%a.out" if words.array else "%x-%j.out",
        "open-mode": "append",
        "signal": f"B:USR1@{job.notice}" if saves else None,
    }
    flags = {"requeue" if saves else "no-requeue": None}
    return {name: value for name, value in options.items() if value is not None} | flags


def _srun(job: Launch, tasks: int) -> list[str]:
    """Options of srun; it takes the cpus of a task from nobody but itself."""
    words = job.words
    found = [f"--nodes={job.nodes}", f"--ntasks-per-node={tasks}", "--kill-on-bad-exit=1"]
    if words.cpus:
        found.append(f"--cpus-per-task={words.cpus}")
    if words.image:
        found.append(f"--container-image={words.image}")  # of the pyxis plugin
        found.append("--container-mount-home")
    return found


def _command(job: Launch) -> tuple[str, ...]:
    """The command of every task of an array, without the options of `_each`."""
    words, command = job.words, job.command
    if words.array is None:
        return command
    if "--seed" in words.run or any(word.startswith("--seed=") for word in words.run):
        raise AutopipeError("--array gives each task its number as its seed, and --seed was asked")
    if words.checkpoints is None:
        return command
    at = command.index("--checkpoints")
    return (*command[:at], *command[at + 2 :])


def _each(job: Launch) -> str:
    """The options that differ between the tasks of an array, with the shell's variables."""
    if job.words.array is None:
        return ""
    number = '"$SLURM_ARRAY_TASK_ID"'
    found = f" --seed {number}"
    if job.words.checkpoints is not None:
        found += f" --checkpoints {shlex.quote(job.words.checkpoints)}/{number}"
    return found


def _time(seconds: int) -> str:
    """Slurm's form: D-HH:MM:SS."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
