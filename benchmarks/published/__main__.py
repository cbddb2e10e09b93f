"""Predicted beside published: `python -m benchmarks.published ROWS.csv`.

One JSON object per line on stdout: the rows (`"kind": "row"`), then the sweeps, the sources and
all sources together. Errors are (predicted - published) / published.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from autopipe.errors import AutopipeError
from benchmarks.published import memory, scores, zero_bubble
from benchmarks.published.machine import machine_of
from benchmarks.published.rows import Row, Unsupported, read
from benchmarks.published.scores import Prediction
from benchmarks.published.constants import Constants, fitted
from benchmarks.published.step import predict

NEVER_FITTED = "B200"
"""Devices whose rows are reported apart."""


def main() -> int:
    """Print what is predicted for every row of a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("rows", type=Path, help="a CSV of published runs")
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
    print(f"{len(predictions)} of {len(rows)} rows predicted", file=sys.stderr)
    for line in _summaries(predictions):
        _print(line)
    return 0


def predicted(row: Row, constants: Constants = FITTED) -> Prediction:
    """What is predicted for a row.

    Raises:
        Unsupported: something that it holds is not modelled, or it does not say enough.
    """
    run = read(row)
    machine = machine_of(run)
    return Prediction(
        run=run,
        seconds=predict(run, machine, constants).step,
        memory=memory.needed(run, run.memory_kind),
        needed=memory.needed(run, "device"),
        capacity=machine.capacity,
    )


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


def _summaries(predictions: list[Prediction]) -> list[dict[str, Any]]:
    fitted = [p for p in predictions if NEVER_FITTED not in p.run.gpu]
    apart = [p for p in predictions if NEVER_FITTED in p.run.gpu]
    lines = [{"kind": "sweep", **sweep} for sweep in scores.sweeps(predictions)]
    tables: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        tables[prediction.run.table].append(prediction)
    lines += [{"kind": "source", "table": t, **scores.summary(ps)} for t, ps in tables.items()]
    for name, chosen in (
        ("all", fitted),
        ("read", [p for p in fitted if p.run.confidence == "read"]),
        (NEVER_FITTED, apart),
    ):
        if chosen:
            lines.append({"kind": "overall", "rows_of": name, **scores.summary(chosen)})
    return lines


def _print(line: dict[str, Any]) -> None:
    rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in line.items()}
    print(json.dumps(rounded))


if __name__ == "__main__":
    sys.exit(main())
