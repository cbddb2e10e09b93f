"""The command line: Piper's and Galvatron's published problems, a row each, ours beside theirs.

python -m benchmarks.planners FOLDER > rows.jsonl
python -m benchmarks.planners --table rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

from benchmarks.planners import common_ground, galvatron, galvatron_problem, piper, piper_problem

BANDWIDTH = 25 * 2**30
"""Bytes a second in all of Piper's instances."""

BATCH = 64
CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Galvatron's rows a step, and the micro-batches that they may be cut into."""

AGREE = 1e-6
"""How far the planner's own seconds may be from those of Piper's formulas, relatively."""

Row = dict[str, Any]


class PiperCase(NamedTuple):
    """What Piper finds: seconds a micro-batch, None where nothing fits, in CPU seconds."""

    devices: int
    gibibytes: int
    micro_batches: int
    objective: float | None
    cpu: float


PIPER = (
    PiperCase(8, 4, 480, None, 0.06),
    PiperCase(8, 8, 480, 0.165856, 0.04),
    PiperCase(8, 80, 480, 0.123205, 0.04),
    PiperCase(64, 80, 1920, 0.0156502, 0.42),
    PiperCase(16, 8, 960, 0.0829966, 0.10),
    PiperCase(64, 8, 1920, 0.0202006, 0.19),
)
"""On bert32a100; the last two have a dp for each stage."""


class GalvatronCase(NamedTuple):
    """What Galvatron finds on eight devices: rows a second, in CPU seconds."""

    gibibytes: int
    chunks: tuple[int, ...]
    rate: float
    cpu: float


GALVATRON = (
    GalvatronCase(24, (8,), 12.101, 26),
    GalvatronCase(36, (8,), 14.042, 49),
    GalvatronCase(80, (8,), 17.172, 81),
    GalvatronCase(36, CHUNKS, 15.276, 186),
)


def main(argv: list[str] | None = None) -> int:
    """Plan every problem, a row each; the exit code is 1 if a plan breaks its problem's rules."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planners",
        description="Other planners' published problems: their plans, and autopipe's.",
    )
    parser.add_argument("folder", type=Path, help="with piper/ and galvatron/, or rows for --table")
    parser.add_argument(
        "--table", action="store_true", help="the rows of an earlier run as a table"
    )
    chosen = parser.parse_args(argv)
    if chosen.table:
        print(table([json.loads(line) for line in chosen.folder.read_text().splitlines()]))
        return 0
    wrong = 0
    for row in rows(chosen.folder):
        print(json.dumps(row), flush=True)
        wrong += bool(row["wrong"])
    return int(wrong > 0)


def rows(folder: Path) -> Iterator[Row]:
    """Every problem planned; CPU seconds are those after its files are read."""
    graph = piper.read(folder / "piper" / "bert32a100.json")
    for case in PIPER:
        yield of_piper(graph, case)
    costs = galvatron.read(folder / "galvatron")
    for one in GALVATRON:
        yield of_galvatron(costs, one)


def of_piper(graph: piper.Graph, case: PiperCase) -> Row:
    """The objective is in seconds: the ratio is ours to theirs, and less is better."""
    memory = case.gibibytes * 2**30
    conditions = piper.Conditions(case.devices, memory, case.micro_batches, BANDWIDTH)
    begun = process_time()
    found = piper_problem.plan(graph, conditions)
    spent = process_time() - begun
    ours, plan, wrong = None, None, ""
    if found is not None:
        scored = piper.score(graph, conditions, found[1])
        ours = scored.objective
        plan = _piper_plan(found[1])
        if abs(found[0] / ours - 1) > AGREE:
            wrong = f"the planner says {found[0]} seconds, Piper's formulas {ours}"
        if max(scored.memory) > memory:
            wrong = f"a stage needs {max(scored.memory)} of {memory} bytes"
    return {
        **{"instance": "piper/bert32a100", "devices": case.devices, "gibibytes": case.gibibytes},
        **{"micro_batches": case.micro_batches, "objective": "seconds a micro-batch"},
        **{"theirs": case.objective, "ours": ours, "ratio": _ratio(ours, case.objective)},
        **{"cpu_theirs": case.cpu, "cpu_ours": round(spent, 3), "plan": plan, "wrong": wrong},
    }


def of_galvatron(costs: galvatron.Costs, case: GalvatronCase) -> Row:
    """The objective is in rows a second: the ratio is ours to theirs, and more is better."""
    limit = case.gibibytes * 1024
    begun = process_time()
    found = galvatron_problem.plan(costs, BATCH, 8, limit, case.chunks)
    spent = process_time() - begun
    both = common_ground.best(costs, BATCH, 8, limit, case.chunks)
    ours, plan, wrong = None, None, ""
    if found is not None:
        ours = BATCH / found[0].seconds
        way, stages = found[1].vocabulary, found[1].stages
        layers = "/".join(str(len(stage)) for stage in stages)
        again = "/".join(str(sum(layer.recomputed for layer in stage)) for stage in stages)
        plan = (
            f"tp {way.tp} pp {len(stages)} dp {way.dp} zero {way.zero}, "
            f"{found[1].micro_batches} micro-batches, layers {layers}, recomputed {again}"
        )
        if max(found[0].memory) > limit:
            wrong = f"a stage needs {max(found[0].memory)} of {limit} MiB"
    return {
        **{"instance": "galvatron/llama2-7b", "devices": 8, "gibibytes": case.gibibytes},
        **{"micro_batches": "any" if len(case.chunks) > 1 else case.chunks[0]},
        **{"objective": "rows a second", "theirs": case.rate, "ours": ours},
        **{"ratio": _ratio(ours, case.rate), "both": BATCH / both[0].seconds if both else None},
        **{"cpu_theirs": case.cpu, "cpu_ours": round(spent, 3), "plan": plan, "wrong": wrong},
    }


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else round(ours / theirs, 6)


def _piper_plan(stages: Sequence[piper.Stage]) -> str:
    layers = "/".join(str(len(stage.layers)) for stage in stages)
    again = "/".join(str(len(stage.recomputed)) for stage in stages)
    return (
        f"tp {stages[0].tp} pp {len(stages)} dp {stages[0].dp}, layers {layers}, recomputed {again}"
    )


def table(found: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| problem | devices | GiB | micro-batches | theirs | both | ours | ours / theirs "
        "| CPU s theirs | CPU s ours | our plan |",
        "|---" * 11 + "|",
    ]
    for row in found:
        figures = (row["theirs"], row.get("both"), row["ours"], row["ratio"])
        told = " | ".join("" if figure is None else f"{figure:.6g}" for figure in figures)
        lines.append(
            f"| {row['instance']} | {row['devices']} | {row['gibibytes']} "
            f"| {row['micro_batches']} | {told} | {row['cpu_theirs']} | {row['cpu_ours']} "
            f"| {row['plan'] or 'nothing fits'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
