"""Shell scripts read by bash and by shellcheck, which both find what one overlooks; and run, with
programs in the place of launchers that write down what they were started with."""

import subprocess
import sys
from pathlib import Path
from typing import Any


def check_script(text: str) -> None:
    """bash parses it, and shellcheck has nothing to say, but of a $ that is to stay one."""
    parsed = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert parsed.returncode == 0, parsed.stderr
    shellcheck = Path(sys.executable).parent / "shellcheck"
    found = subprocess.run(
        [shellcheck, "--shell=bash", "--exclude=SC2016", "-"],
        input=text,
        text=True,
        capture_output=True,
    )
    assert found.returncode == 0, found.stdout


def words_of(command: str) -> list[str]:
    """What bash makes of a command's words: they come back one a line, with their letters."""
    code = f"printf '%s\\0' {command}"
    out = subprocess.run(["bash", "-c", code], capture_output=True, check=True).stdout
    return out.decode().split("\0")[:-1]


_WRITES_DOWN = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" >> "$STARTED"
echo >> "$STARTED"
"""

_RUNS_A_TASK = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""

_ANSWERS = """#!/bin/bash
echo node1
"""

_LAUNCHERS = {
    "torchrun": _WRITES_DOWN,
    "python": _WRITES_DOWN,
    "srun": _RUNS_A_TASK,
    "scontrol": _ANSWERS,
    "getent": _ANSWERS,
    "mkdir": _ANSWERS,
    "hostname": _ANSWERS,
}


def launchers(folder: Path) -> Path:
    """A folder with programs that stand for launchers, and for all else that a script may start."""
    programs = folder / "programs"
    programs.mkdir()
    for name, code in _LAUNCHERS.items():
        (programs / name).write_text(code)
        (programs / name).chmod(0o755)
    (programs / "bash").symlink_to("/bin/bash")
    return programs


def started(text: str, folder: Path, programs: Path) -> list[str]:
    """The one command that a script of the first of its nodes comes to, in its words.

    Args:
        folder: that it is run in; what it looks for is there.
        programs: of `launchers`.
    """
    found = programs.parent / "started"
    found.unlink(missing_ok=True)
    environ = {
        "PATH": str(programs), "STARTED": str(found), "MASTER_ADDR": "node1", "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "autopipe",
        "SLURM_JOB_NUM_NODES": "1",
    }  # fmt: skip
    done = subprocess.run(
        ["/bin/bash", "-c", text, "train.sh", "0"],
        cwd=folder, env=environ, capture_output=True, timeout=20,
    )  # fmt: skip
    assert done.returncode == 0, (done, text)
    (line,) = found.read_bytes().split(b"\0\n")[:-1]
    return line.decode().split("\0")


def commands(data: Any) -> list[list[str]]:
    """What the containers of a manifest run."""
    if isinstance(data, dict):
        own = [data["command"]] if "command" in data else []
        return own + [found for value in data.values() for found in commands(value)]
    return [found for value in data for found in commands(value)] if isinstance(data, list) else []
