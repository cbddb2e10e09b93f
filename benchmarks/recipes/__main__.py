"""The command line: `python -m benchmarks.recipes RECIPES.csv`, an expert's layout beside ours.

One JSON object a line on stdout, a table of Markdown on stderr. Both layouts are scored by one
estimate, `autopipe.plan`'s; theirs is planned with their choices as constraints.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import autopipe
from autopipe.cluster.cluster import Cluster
from autopipe.errors import AutopipeError, InfeasibleError
from benchmarks.planning.models import tokens
from benchmarks.published import workers
from benchmarks.published.cluster import cluster_of
from benchmarks.published.rows import Unsupported
from benchmarks.published.tool import outcome, roomy
from benchmarks.recipes.recipe import Layout, Recipe, Unbuilt, read

Line = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Plan every recipe; the exit code is 1 if the free choice is slower than an expert's."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recipes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipes", type=Path, help="a CSV of recipes")
    parser.add_argument("--of", default="", help="those whose name has this in it")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a row may take")
    asked = parser.parse_args(argv)
    with asked.recipes.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if asked.of in (row.get("recipe") or "")]
    found = []
    for row, line in workers.done(rows, answer, jobs=asked.jobs, limit=asked.limit):
        found.append({"recipe": row.get("recipe"), **line})
        print(json.dumps(found[-1]), flush=True)
    print(table(found), file=sys.stderr)
    return int(any(line.get("ratio", 1.0) < 1 for line in found))


def answer(row: dict[str, str]) -> Line:
    """Both layouts of a row by one estimate, or why there is none.

    `ratio` is the experts' step over ours: below 1 the search has missed something.
    """
    try:
        recipe = read(row)
        cluster = cluster_of(recipe.gpu, None, recipe.gpus, min(recipe.gpus, 8), "", "")
        line: Line = {"gpus": f"{recipe.gpus} {recipe.gpu}", "theirs": _theirs(recipe, cluster)}
        begun = time.monotonic()
        line["ours"] = asdict(outcome(autopipe.plan(**_question(recipe, cluster)), cluster))
        line["planned_in"] = round(time.monotonic() - begun, 1)
    except (Unbuilt, Unsupported, AutopipeError) as reason:
        return {"refused": str(reason).partition("\n")[0]}
    except Exception as error:  # a bug of the tool is a row's result too
        return {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}
    if line["theirs"].get("fits"):
        line["ratio"] = line["theirs"]["seconds"] / line["ours"]["seconds"]
    return line


def _question(recipe: Recipe, cluster: Cluster) -> Line:
    """The question: all but the layout. Gradients are summed in 16 bits, as NVIDIA's performance
    recipes do (`_perf_precision`: grad_reduce_in_fp32 = False)."""
    return {
        "model": partial(recipe.model.build, recipe.seq, recipe.rank),
        "inputs": tokens(recipe.seq),
        "cluster": cluster,
        "batch_size": recipe.batch,
        "precision": "bf16",
        "grad_dtype": "bf16",
    }


def _theirs(recipe: Recipe, cluster: Cluster) -> Line:
    """The experts' layout; where it is said not to fit, as if devices had memory without end."""
    layout = recipe.layout
    if not isinstance(layout, Layout):
        return {"refused": layout}
    asked = {
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "micro_batches": layout.micro_batches,
        "schedule": "interleaved" if layout.chunks > 1 else "1f1b",
        "chunks": layout.chunks if layout.chunks > 1 else None,
        "planner": "uniform" if layout.even else "dynamic",
        "zero": layout.zero,
        "recompute": layout.recompute,
        "sequence_parallel": layout.sequence_parallel,
    }
    try:
        plan = autopipe.plan(**{**_question(recipe, cluster), **asked})
    except InfeasibleError:
        plan = autopipe.plan(**{**_question(recipe, roomy(cluster)), **asked})
    found = outcome(plan, cluster)
    return {**asdict(found), "fits": found.fits, "replaced": layout.replaced}


def table(lines: list[Line]) -> str:
    """Rows as they stand in the README."""
    heads = ["recipe", "GPUs", "theirs", "s", "fits", "ours", "s", "theirs / ours", "planned in s"]
    rows = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for line in lines:
        why = line.get("refused") or line.get("failed")
        if why:
            cells = ["", why, *[""] * 6]
        else:
            theirs, ours, ratio = line["theirs"], line["ours"], line.get("ratio")
            cells = [line["gpus"], *_layout(theirs), ours["layout"], f"{ours['seconds']:.3g}"]
            cells += [f"{ratio:.2f}" if ratio else "", f"{line['planned_in']:g}"]
        rows.append(f"| {line['recipe']} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _layout(theirs: Line) -> list[str]:
    if "refused" in theirs:
        return [theirs["refused"], "", ""]
    held = f"{theirs['needed'] / 2**30:.0f} of {theirs['capacity'] / 2**30:.0f} GiB"
    words = "; ".join([theirs["layout"], *theirs["replaced"]])
    return [words, f"{theirs['seconds']:.3g}", "yes" if theirs["fits"] else f"no, {held}"]


if __name__ == "__main__":
    sys.exit(main())
