"""Predicted beside published: `python -m benchmarks.published ROWS.csv`.

One JSON object per line on stdout: the rows (`"kind": "row"`), then the sweeps, the sources and
all sources together; a table by source on stderr. Errors are (predicted - published) / published.
No row is predicted with constants that were fitted to its own source. A table of profiled times,
as the zero-bubble paper has, is answered by bubble rates.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autopipe.errors import AutopipeError
from benchmarks.published import memory, scores, zero_bubble
from benchmarks.published.constants import Constants, fitted
from benchmarks.published.machine import NEVER_FITTED, machine_of
from benchmarks.published.rows import Row, Unsupported, read
from benchmarks.published.scores import Prediction
from benchmarks.published.step import predict


def main() -> int:
    """Print what is predicted for every row of a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("rows", type=Path, help="a CSV of published runs, or of profiled times")
    path = parser.parse_args().rows
    with path.open(newline="") as file:
        rows: list[Row] = list(csv.DictReader(file))
    if rows and zero_bubble.COLUMNS <= set(rows[0]):
        return zero_bubble.report(rows)
    predictions = []
    for row in rows:
        try:
            prediction = predicted(row)
        except (Unsupported, AutopipeError) as reason:
            head = {"kind": "row", "run_id": row.get("run_id"), "source": row.get("source")}
            _print({**head, "unsupported": str(reason)})
        else:
            predictions.append(prediction)
            _print(_line(prediction))
    lines = summaries(predictions)
    for line in lines:
        _print(line)
    print(f"{len(predictions)} of {len(rows)} rows predicted\n{table(lines)}", file=sys.stderr)
    return 0


def predicted(row: Row, constants: Constants | None = None) -> Prediction:
    """What is predicted for a row, by default with constants fitted to other sources than its own.

    Raises:
        Unsupported: something that it holds is not modelled, or it does not say enough.
    """
    run = read(row)
    machine = machine_of(run)
    constants = constants or fitted(run.origin)
    allocated = memory.allocated(run)
    return Prediction(
        run=run,
        seconds=predict(run, machine, constants).step,
        memory=memory.needed(allocated, run.memory_kind, constants),
        needed=memory.needed(allocated, "device", constants),
        capacity=machine.capacity,
    )


def summaries(predictions: Iterable[Prediction]) -> list[dict[str, Any]]:
    """Sweeps, tables by their name, and all rows together, as they are printed."""
    predictions = list(predictions)
    lines = [{"kind": "sweep", **sweep} for sweep in scores.sweeps(predictions)]
    tables: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        tables[prediction.run.table].append(prediction)
    lines += [{"kind": "source", "rows_of": t, **scores.summary(ps)} for t, ps in tables.items()]
    seen = [p for p in predictions if NEVER_FITTED not in p.run.gpu]
    for name, chosen in (
        ("all", seen),
        ("read", [p for p in seen if p.run.confidence == "read"]),
        (NEVER_FITTED, [p for p in predictions if NEVER_FITTED in p.run.gpu]),
    ):
        if chosen:
            lines.append({"kind": "overall", "rows_of": name, **scores.summary(chosen)})
    return lines


COLUMNS = {
    "rows_of": "rows of",
    "step_rows": "timed",
    "step_median_error": "median",
    "step_p90_error": "p90",
    "step_bias": "bias",
    "memory_rows": "memory",
    "memory_median_error": "median",
    "oom_published": "oom",
    "oom_balanced_accuracy": "told",
}
"""What the table shows of a summary, by key and heading."""


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Summaries as text, and the sweeps that are not ordered as they are held to."""
    shown = [list(COLUMNS.values())]
    bad = []
    for line in lines:
        if line["kind"] != "sweep":
            shown.append([_cell(line.get(key)) for key in COLUMNS])
        elif not line["held"]:
            bad.append(
                f"sweep {line['table']} {line['model']}, {line['rows']} rows: rank correlation "
                f"{line['rank_correlation']:.3f}, best {line['best']:+.1%}"
            )
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    text = [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in shown
    ]
    return "\n".join([*text, *bad])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "" if value is None else str(value)


def _line(found: Prediction) -> dict[str, Any]:
    run = found.run
    return {
        "kind": "row",
        "run_id": run.id,
        "source": run.source,
        "table": run.table,
        "predicted_step_s": found.seconds,
        "published_step_s": run.seconds,
        "error": found.error,
        "predicted_memory_gib": found.memory / 2**30,
        "published_memory_gib": run.memory / 2**30 if run.memory else None,
        "memory_error": found.memory_error,
        "predicted_oom": found.oom,
        "published_oom": run.oom,
    }


def _print(line: dict[str, Any]) -> None:
    rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in line.items()}
    print(json.dumps(rounded))


if __name__ == "__main__":
    sys.exit(main())
