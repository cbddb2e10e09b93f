"""The cases: models and the clusters they are planned for; and a run of the command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopipe.planfile.contents import Plan

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Case:
    """A command line; `limit` are the seconds and `memory` the GiB that it should not pass."""

    model: str
    options: tuple[str, ...]
    limit: float | None = None
    memory: float | None = None


_HERE = "benchmarks/planning"

CASES: dict[str, Case] = {
    "llama-405b": Case(
        f"{_HERE}/llama_405b.py",
        ("--cluster", "2048x8xH100-80GB", "--batch", "2048", "--precision", "bf16"),
        20.0,
        2.0,
    ),
    "llama-70b": Case(
        f"{_HERE}/llama_70b.py",
        ("--cluster", "8x8xH100-80GB", "--batch", "512", "--precision", "bf16"),
    ),
    "gpt-oss-120b": Case(
        f"{_HERE}/gpt_oss_120b.py",
        ("--cluster", "16x8xH100-80GB", "--batch", "256", "--precision", "bf16"),
    ),
    "mixtral-8x22b": Case(
        f"{_HERE}/mixtral_8x22b.py",
        ("--cluster", "16x8xH100-80GB", "--batch", "512", "--precision", "bf16"),
    ),
    "llama-7b": Case(
        f"{_HERE}/llama_7b.py",
        ("--cluster", "1x8xH100-80GB", "--batch", "64", "--precision", "bf16"),
        6.0,
    ),
    "gemma2-9b": Case(
        f"{_HERE}/gemma2_9b.py",
        ("--cluster", "1x8xH100-80GB", "--batch", "64", "--precision", "bf16"),
    ),
    "t5-xl": Case(
        f"{_HERE}/t5_xl.py",
        ("--cluster", "2x8xA100-80GB", "--batch", "128", "--precision", "bf16"),
    ),
    "t5-11b": Case(
        f"{_HERE}/t5_11b.py",
        ("--cluster", "4x8xA100-80GB", "--batch", "256", "--precision", "bf16"),
        25.0,
        2.0,
    ),
    "gpt": Case("examples/gpt.py", ("--cluster", "1x4xA100-40GB")),
}
"""By name; the limits are those for a quiet machine of two cores."""


def run(name: str) -> dict[str, Any]:
    """Plan once, from the start of a process to the file, and say what it took.

    Raises:
        RuntimeError: the command failed; with what it said.
    """
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "autopipe", "plan", str(ROOT / case.model), *case.options]
        begun = time.perf_counter()
        process = subprocess.Popen(
            [*command, "-o", str(written)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        assert process.stderr is not None
        talk = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - begun
        if process.returncode:
            raise RuntimeError(f"{name}: {' '.join(command)} failed:\n{talk}")
        size, plan = written.stat().st_size, Plan.load(written)
    mesh = plan.mesh
    return {
        "case": name,
        "wall": round(wall, 1),
        "limit": case.limit,
        "cpu": round(used.ru_utime + used.ru_stime, 1),
        "rss_gib": round(used.ru_maxrss / 2**20, 2),
        "memory": case.memory,
        "phases": phases(talk),
        "load": round(os.getloadavg()[0], 1),
        "file_bytes": size,
        "plan": f"pp={mesh.pp} dp={mesh.dp} tp={mesh.tp} {plan.schedule} zero={plan.zero} "
        f"micro_batches={plan.batch.micro_batches}",
        "step_seconds": plan.prediction.step_seconds,
        "bound_gap": plan.planner.step_seconds / plan.planner.bound_seconds - 1,
    }


def phases(talk: str) -> dict[str, float]:
    """The seconds by phase that the command has said: `time: traced 3.1 s, costs 2.0 s`."""
    said = re.findall(r"^time: (.*)$", talk, re.MULTILINE)
    return {name: float(took) for name, took in re.findall(r"(\w+) ([\d.]+) s", said[-1])}
