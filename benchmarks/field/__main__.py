"""The command line: plans for the clusters that people have, a JSON line each.

python -m benchmarks.field > rows.jsonl
python -m benchmarks.field sites/1.5b mixed
python -m benchmarks.field --table rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import autopipe
from autopipe.cluster import spec
from autopipe.cluster.cluster import Cluster
from autopipe.frontend import model_file
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import data_parallel
from autopipe.planfile.traffic import traffic
from autopipe.util.numbers import gigabytes
from benchmarks.field import mixed
from benchmarks.planning.models import llama, tokens

SITES = "4x1x2xA100-80GB@30ms,1Gbit/s"
MIXED = "2xA100-80GB+4xA100-40GB+2xRTX4090"
EQUAL = "8xRTX4090"
MINI = str(Path(__file__).parents[2] / "examples" / "mini_gpt" / "model.py")

ROWS = tokens(2048)
"""Rows of the language models' batches."""

Row = dict[str, Any]


def said(plan: Plan) -> Row:
    """What a plan is, and what it takes by the planner's own estimate."""
    mesh, note = plan.mesh, plan.planner
    return {
        "mesh": f"pp={mesh.pp} dp={mesh.dp} tp={mesh.tp}",
        "schedule": f"{plan.schedule}, {plan.batch.micro_batches} micro-batches",
        "zero": plan.zero,
        "recomputed": len({block for stage in plan.stages for block in stage.blocks_again}),
        "seconds": note.step_seconds,
        "why": note.binding,
        "idle": plan.cluster.num_devices - len(mesh.places),
    }


def sites(name: str) -> Row:
    """524,288 tokens a step on four sites of two GPUs: 30 ms and 1 Gbit/s between them."""
    model = partial(llama, name)
    plan = autopipe.plan(model, ROWS, cluster=SITES, batch_size=256, precision="bf16")
    row, sent, plain = said(plan), traffic(plan), data_parallel(plan.planner.alternatives)
    if sent is not None:
        row["sent"] = (
            f"{gigabytes(sent.activations)} of activations, {gigabytes(sent.gradients)} of their "
            f"gradients, {gigabytes(sent.sums)} of sums of parameters' gradients"
        )
        row["sums_of_all"] = gigabytes(sent.sum_of_all)
    if plain is not None:
        row["beside"] = f"data parallelism alone, dp={plain.dp} zero={plain.zero}"
        row["beside_seconds"] = plain.step_seconds
        row["beside_why"] = plain.why
    return row


def mini_gpt() -> Row:
    """The mini-GPT on the eight GPUs of one node: tp=2 x pp=4 forced, and what is picked."""
    file = model_file.load(MINI)
    forced, free = (
        autopipe.plan(
            file.model, file.inputs, loss=file.loss, cluster="8xA100-80GB", batch_size=64, **asked
        )
        for asked in ({"pp": 4, "tp": 2}, {})
    )
    row = said(free)
    row["beside"] = f"forced {said(forced)['mesh']}, {said(forced)['schedule']}"
    row["beside_seconds"] = forced.planner.step_seconds
    return row


def unequal() -> Row:
    """LLaMA-2-7B on eight GPUs of three kinds, and the best plan for eight of the smallest."""
    rows = 64
    cluster = spec.parse(MIXED)
    assert isinstance(cluster, Cluster)
    model = partial(llama, "llama-7b")
    plan = autopipe.plan(model, ROWS, cluster=cluster, batch_size=rows, precision="bf16")
    found = mixed.compare(model, ROWS, cluster, rows, "bf16")
    row = said(plan)
    frame = found.equal.config
    row["beside"] = f"{frame} {frame.schedule} zero={frame.zero}, planned for {EQUAL}"
    row["beside_seconds"] = found.equal_seconds
    row["beside_expected"] = found.thought
    return row


def odd(devices: int) -> Row:
    """The 1.5 B decoder on so many GPUs of one node, 64 rows a step."""
    return said(
        autopipe.plan(
            partial(llama, "decoder-1.5b"),
            ROWS,
            cluster=f"{devices}xA100-80GB",
            batch_size=64,
            precision="bf16",
        )
    )


CASES: dict[str, Callable[[], Row]] = {
    "sites/1.5b": lambda: sites("decoder-1.5b"),
    "sites/13b": lambda: sites("llama-13b"),
    "mini_gpt": mini_gpt,
    "mixed": unequal,
    **{f"odd/{devices}": lambda devices=devices: odd(devices) for devices in (6, 7, 11, 12)},
}


def table(rows: list[Row]) -> Iterator[str]:
    """Lines of Markdown."""
    yield "| case | plan | idle | a step, s | beside it | a step, s | times as long |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        plan = f"{row['mesh']}, {row['schedule']}"
        plan += f", ZeRO {row['zero']}" if row["zero"] else ""
        plan += f", {row['recomputed']} blocks again" if row["recomputed"] else ""
        step, other = row["seconds"], row.get("beside_seconds")
        yield (
            f"| {row['case']} | {plan} | {row['idle']} | {step:.3g} | {row.get('beside', '')} | "
            + (" | |" if other is None else f"{other:.3g} | {other / step:.2f} |")
        )


def main(argv: list[str] | None = None) -> int:
    """Plan every case that is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.field",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; or rows for --table")
    parser.add_argument("--table", action="store_true", help="rows of an earlier run as a table")
    chosen = parser.parse_args(argv)
    if chosen.table:
        lines = [line for path in chosen.cases for line in Path(path).read_text().splitlines()]
        print("\n".join(table([json.loads(line) for line in lines])))
        return 0
    unknown = [name for name in chosen.cases if name not in CASES]
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}: one of {', '.join(CASES)}")
    for name in chosen.cases or CASES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        print(json.dumps({"case": name, **CASES[name]()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
