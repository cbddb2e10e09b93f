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
from autopipe.cluster import Cluster, Group, Node
from autopipe.plan import Plan
from autopipe.probe import probe
from autopipe.runtime.spawn import spawn
from autopipe.runtime.train import Measured
from benchmarks.honesty.case import CASES, Case, Row, row, summary
from benchmarks.honesty.models import MODELS

RUN = 3.0
"""Seconds that the steps of a run take, as predicted."""


def main(argv: list[str] | None = None) -> int:
    """Run the cases whose names contain one of the arguments; a row each, then a summary."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.honesty", description="Predicted beside measured, here."
    )
    parser.add_argument("names", nargs="*", help="parts of names; all cases")
    chosen = parser.parse_args(argv)
    rows = []
    for case in CASES:
        if not chosen.names or any(name in case.name for name in chosen.names):
            rows.append(run(case))
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(summary(rows)), flush=True)
    return 0


def run(case: Case) -> Row:
    """One case; the machine is probed right before, as its neighbours may have come or gone."""
    device, link = probe(case.processes)
    cluster = Cluster(
        f"local:{case.processes}", (Node(1, (Group(case.processes, device),)),), link, link
    )
    plan = make(case, cluster)
    with tempfile.TemporaryDirectory() as name:
        path, output = Path(name, "plan.json"), Path(name, "measured.json")
        plan.save(path)
        steps = max(10, min(300, round(RUN / plan.prediction.step_seconds)))
        command = (sys.executable, "-m", "benchmarks.honesty.rank")
        code = spawn(case.processes, [case.model, str(path), str(steps), str(output)], command)
        if code:
            raise SystemExit(f"{case.name}: a process ended with code {code}")
        return row(case, plan, codec.load(Measured, output, root="measured"))


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
