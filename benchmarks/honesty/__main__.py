"""The command line: for every case, probe the machine, plan, run the plan, print both.

python -m benchmarks.honesty > rows.jsonl
python -m benchmarks.honesty gpt/pp2 llama --precision bf16
python -m benchmarks.honesty --table rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import autopipe
from autopipe.cluster.cluster import Cluster, Group, NodeGroup
from autopipe.planfile.contents import Plan
from autopipe.runtime.launch.spawn import spawn
from autopipe.runtime.probe.probe import probe
from autopipe.runtime.train import Measured
from autopipe.util import codec
from benchmarks.honesty.case import CASES, Case, Row, row, summary, table
from benchmarks.honesty.models import MODELS
from benchmarks.honesty.quiet import cores, disturbed, drift

RUN = 3.0
"""Seconds that the steps of a run take, as predicted."""


def main(argv: list[str] | None = None) -> int:
    """Run the cases whose names contain one of the arguments; a row each, then a summary."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.honesty", description="Predicted beside measured, here."
    )
    parser.add_argument("names", nargs="*", help="parts of names; all cases")
    parser.add_argument("--tries", type=int, default=3, help="while other programs run")
    parser.add_argument("--precision", default="fp32", help="of all cases: fp32, or bf16")
    parser.add_argument("--table", type=Path, help="the rows of an earlier run as a table")
    chosen = parser.parse_args(argv)
    if chosen.table:
        lines = chosen.table.read_text().splitlines()
        print(table([found for line in lines if "case" in (found := json.loads(line))]))
        return 0
    machine = Machine()
    rows = []
    for case in CASES:
        if not chosen.names or any(name in case.name for name in chosen.names):
            rows.append(quietly(case, machine, chosen.tries, chosen.precision))
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(summary(rows)), flush=True)
    return 0


def quietly(case: Case, machine: Machine, tries: int, precision: str) -> Row:
    """The first try that nothing disturbed, else the one that was disturbed the least.

    How far off its prediction is, is not looked at.
    """
    found: list[Row] = []
    while len(found) < tries and (not found or found[-1]["disturbed"] > 1):
        found.append(run(case, machine, precision))
    quietest = min(found, key=lambda row: row["disturbed"])
    return {**quietest, "precision": precision, "tries": len(found)}


def run(case: Case, machine: Machine, precision: str) -> Row:
    """One case: planned on the machine as it was last probed, run, and the machine probed again."""
    with cores(case.processes):
        before = machine.probed(case.processes)
        plan = make(case, before, precision)
        measured, waited, held = train(case, plan)
        after = machine.probed(case.processes, again=True)
    drifted = drift(before.row[0], after.row[0])
    found = {"waited": waited, "drift": drifted, "disturbed": disturbed(waited, drifted)}
    return {**row(case, plan, measured, held), **found}


def train(case: Case, plan: Plan) -> tuple[Measured, float, list[int]]:
    """What the plan's processes measure, the longest share that one waited for its core, and the
    peak bytes of each rank's allocator."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan.save(folder / "plan.json")
        steps = max(10, min(300, round(RUN / plan.prediction.step_seconds)))
        command = (sys.executable, "-m", "benchmarks.honesty.rank")
        for number in (steps, 0):
            arguments = [case.model, str(folder / "plan.json"), str(number), name]
            code = spawn(case.processes, arguments, command)
            if code:
                raise SystemExit(f"{case.name}: a process ended with code {code}")
        measured = codec.load(Measured, folder / "measured.json", root="measured")
        waited = max(float(path.read_text()) for path in folder.glob("*.waited"))
        ranks = range(case.processes)
        return measured, waited, [int((folder / f"{rank}.bytes").read_text()) for rank in ranks]


class Machine:
    """This machine as it was last probed with so many processes."""

    def __init__(self) -> None:
        self._last: dict[int, Cluster] = {}

    def probed(self, processes: int, *, again: bool = False) -> Cluster:
        """A cluster of so many processes; measured now if it was never, or `again`."""
        if again or processes not in self._last:
            device, link = probe(processes)
            node = NodeGroup(1, (Group(processes, device),))
            self._last[processes] = Cluster(f"local:{processes}", (node,), link, link)
        return self._last[processes]


def make(case: Case, cluster: Cluster, precision: str) -> Plan:
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
        precision=precision,
    )


if __name__ == "__main__":
    sys.exit(main())
