"""The command line: for every case, probe the machine, plan, run the plan, print both.

python -m benchmarks.honesty > rows.jsonl
python -m benchmarks.honesty gpt/pp2 llama
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import autopipe
from autopipe import codec
from autopipe.cluster import Cluster, Device, Group, Link, Node
from autopipe.plan import Plan
from autopipe.probe import probe
from autopipe.runtime.spawn import spawn
from autopipe.runtime.train import Measured
from benchmarks.honesty.case import CASES, Case, Row, row, summary
from benchmarks.honesty.models import MODELS

WAITED = 0.03
"""The share of a run in which a process may have waited for its core."""

RUN = 3.0
"""Seconds that the steps of a run take, as predicted."""


def main(argv: list[str] | None = None) -> int:
    """Run the cases whose names contain one of the arguments; a row each, then a summary."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.honesty", description="Predicted beside measured, here."
    )
    parser.add_argument("names", nargs="*", help="parts of names; all cases")
    parser.add_argument("--tries", type=int, default=3, help="while other programs run")
    chosen = parser.parse_args(argv)
    rows = []
    for case in CASES:
        if not chosen.names or any(name in case.name for name in chosen.names):
            rows.append(quietly(case, chosen.tries))
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(summary(rows)), flush=True)
    return 0


def quietly(case: Case, tries: int) -> Row:
    """The first try whose processes had their cores, else the one that had them the most.

    How long they waited is looked at; how far off the prediction is, is not.
    """
    found: list[Row] = []
    while len(found) < tries and (not found or found[-1]["waited"] > WAITED):
        found.append(run(case))
    return {**min(found, key=lambda row: row["waited"]), "tries": len(found)}


def run(case: Case) -> Row:
    """One case; the machine is probed right before, as its neighbours may have come or gone."""
    device, link = probed(case.processes)
    cluster = Cluster(
        f"local:{case.processes}", (Node(1, (Group(case.processes, device),)),), link, link
    )
    plan = make(case, cluster)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan.save(folder / "plan.json")
        steps = max(10, min(300, round(RUN / plan.prediction.step_seconds)))
        command = (sys.executable, "-m", "benchmarks.honesty.rank")
        arguments = [case.model, str(folder / "plan.json"), str(steps), name]
        code = spawn(case.processes, arguments, command)
        if code:
            raise SystemExit(f"{case.name}: a process ended with code {code}")
        measured = codec.load(Measured, folder / "measured.json", root="measured")
        waited = max(float(path.read_text()) for path in folder.glob("*.waited"))
    return {**row(case, plan, measured), "waited": waited}


_best: dict[int, float] = {}
"""The fastest matmuls that so many processes have reached yet."""


def probed(processes: int, tries: int = 3) -> tuple[Device, Link]:
    """A probe that nobody seems to have disturbed: its matmuls are about as fast as any before."""
    for _ in range(tries):
        device, link = probe(processes)
        rate = device.flops["fp32"]
        _best[processes] = max(rate, _best.get(processes, 0.0))
        if rate > 0.9 * _best[processes]:
            break
    return device, link


def make(case: Case, cluster: Cluster) -> Plan:
    """The case's plan; nothing is left to the planner but the cut."""
    file = MODELS[case.model]()
    return autopipe.plan(
        file.model,
        file.inputs,
        loss=file.loss,
        cluster=cluster,
        batch_size=case.rows,
        pp=case.pp,
        dp=case.dp,
        tp=case.tp,
        micro_batches=case.micro_batches,
        schedule=case.schedule,
        zero=case.zero,
        recompute="all" if case.recompute else (),
    )


if __name__ == "__main__":
    sys.exit(main())
