"""The tool itself beside published runs: `python -m benchmarks.published.traced ROWS.csv`.

Each row becomes an unmodified module of its dimensions (`module.py`), traced and planned by
`autopipe.plan` with the row's layout as constraints, as `autopipe plan --tp 8 --pp 4 ...` does it.
Nothing is fitted. `--each N` takes N rows of every table, evenly; without it all are planned, which
takes 5 to 20 seconds a row. One JSON object per line on stdout, then the summaries of `scores`; a
table on stderr.

`needed` is the plan's peak on the fullest device. Plans are made for devices with memory without
end, so that a layout that is said not to fit has a step as well.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

import autopipe
from autopipe.cluster.cluster import Cluster, Group
from autopipe.errors import AutopipeError
from autopipe.report.fullest import fullest
from autopipe.schedules.registry import SCHEDULES
from benchmarks.published.__main__ import summaries, table
from benchmarks.published.machine import cluster_of
from benchmarks.published.module import Transformer
from benchmarks.published.rows import Row, Run, Unsupported, read
from benchmarks.published.scores import Prediction

ROOM = 100
"""How many times a device's memory a plan may fill here."""


def main() -> int:
    """Print what the tool predicts for the rows of a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.traced")
    parser.add_argument("rows", type=Path, help="a CSV of published runs")
    parser.add_argument("--each", type=int, help="so many rows of every table; default: all")
    asked = parser.parse_args()
    with asked.rows.open(newline="") as file:
        rows: list[Row] = list(csv.DictReader(file))
    found, refused = list[Prediction](), Counter[str]()
    for run in sampled(rows, asked.each):
        began = time.monotonic()
        try:
            prediction = predicted(run)
        except (Unsupported, AutopipeError) as reason:
            refused[run.table] += 1
            said = str(reason).partition("\n")[0]
            print(json.dumps({"run_id": run.id, "table": run.table, "refused": said}), flush=True)
            continue
        found.append(prediction)
        print(json.dumps(_line(prediction, time.monotonic() - began)), flush=True)
    lines = summaries(found)
    for line in lines:
        print(json.dumps(line))
    ran = [p for p in found if not p.run.oom]
    misfits = sum(p.oom for p in ran)
    print(
        f"{len(found)} rows planned, {sum(refused.values())} refused {dict(refused)}; "
        f"{misfits} of {len(ran)} that ran are said not to fit\n{table(lines)}",
        file=sys.stderr,
    )
    return 0


def sampled(rows: Sequence[Row], each: int | None) -> Iterator[Run]:
    """The runs that have a step time and are supported; `each` of every table."""
    tables: dict[str, list[Run]] = defaultdict(list)
    for row in rows:
        try:
            run = read(row)
        except Unsupported:
            continue
        if run.seconds:
            tables[run.table].append(run)
    for runs in tables.values():
        count = min(each or len(runs), len(runs))
        yield from (runs[n * len(runs) // count] for n in range(count))


def predicted(run: Run) -> Prediction:
    """What `autopipe.plan` says of a run's layout.

    Raises:
        Unsupported: the tool has not what the run used.
        AutopipeError: the tool refuses the model or the layout.
    """
    cluster, _ = cluster_of(
        run.gpu, run.memory_gb, run.devices, run.per_node, run.within, run.between
    )
    if run.schedule not in SCHEDULES:
        raise Unsupported(f"schedule {run.schedule}")
    plan = autopipe.plan(
        partial(Transformer, run),
        partial(_batch, run),
        cluster=_roomy(cluster),
        batch_size=run.micro_batch * run.micro_batches * run.dp,
        pp=run.pp,
        dp=run.dp,
        tp=run.tp,
        micro_batches=run.micro_batches,
        schedule=run.schedule,
        chunks=run.chunks if run.schedule == "interleaved" else None,
        zero=min(run.sharding, 1) if run.sharding < 3 else 3,
        recompute=_recompute(run),
        precision="fp32" if run.pure else _precision(cluster),
        sequence_parallel=run.sequence_parallel,
    )
    needed = float(fullest(plan).held)
    capacity = min(device.memory for device in cluster.devices)
    return Prediction(run, plan.prediction.step_seconds, needed, needed, capacity)


def _precision(cluster: Cluster) -> str:
    return "bf16" if all("bf16" in device.flops for device in cluster.devices) else "fp16"


def _roomy(cluster: Cluster) -> Cluster:
    """The cluster, its devices with memory without end."""

    def larger(group: Group) -> Group:
        return dataclasses.replace(
            group, device=dataclasses.replace(group.device, memory=ROOM * group.device.memory)
        )

    nodes = tuple(
        dataclasses.replace(node, groups=tuple(map(larger, node.groups))) for node in cluster.nodes
    )
    return dataclasses.replace(cluster, nodes=nodes)


def _batch(run: Run, rows: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(rows, run.model.seq, dtype=torch.long)
    return {"tokens": tokens, "labels": tokens}


def _recompute(run: Run) -> str | list[str]:
    """What runs again, as far as autopipe can: whole blocks."""
    if run.recompute == "alternate":
        return [f"layers.{n}" for n in range(0, run.model.layers, 2)]
    return "all" if run.recompute == "full" else "none"


def _line(found: Prediction, planned: float) -> dict[str, object]:
    run = found.run
    return {
        "run_id": run.id,
        "table": run.table,
        "model": run.name,
        "layout": f"tp={run.tp} pp={run.pp} dp={run.dp} {run.schedule} {run.recompute}",
        "published_seconds": run.seconds,
        "predicted_seconds": found.seconds,
        "error": found.error,
        "published_bytes": run.memory,
        "needed_bytes": found.needed,
        "memory_error": found.memory_error,
        "fits": not found.oom,
        "planned_in": round(planned, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
