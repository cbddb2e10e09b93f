"""The tool beside published runs: `python -m benchmarks.published ROWS.csv`.

Each row becomes an unmodified module of its dimensions, planned by `autopipe.plan` with the row's
layout as constraints (`tool.py`). One JSON object a line on stdout: the rows (`"kind": "row"`) as
they end, then sweeps, tables, profiles and all together; the same as tables of Markdown on stderr.
Errors are (predicted - published) / published. A table of profiled times, as the zero-bubble paper
has, is answered by bubble rates.

A row that cannot be read, or that the tool refuses, is a line that says why; it stops nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autopipe.errors import AutopipeError
from benchmarks.published import tool, workers, zero_bubble
from benchmarks.published.rows import Run, Unsupported, read
from benchmarks.published.scores import Prediction
from benchmarks.published.software import Row
from benchmarks.published.summary import chosen, far, misfits, summaries, table

Line = dict[str, Any]


@dataclass(frozen=True)
class Readable:
    """A row that could be read: its name in this file, and its run."""

    key: str
    run: Run


def main(argv: list[str] | None = None) -> int:
    """Print what is predicted for the rows of a file."""
    asked = _arguments(argv)
    with asked.rows.open(newline="") as file:
        rows: list[Row] = list(csv.DictReader(file))
    if rows and zero_bubble.COLUMNS <= set(rows[0]):
        return zero_bubble.report(rows)
    runs = [found for found in readable(rows) if any(w in found.run.table for w in asked.of)]
    runs = sampled(runs, asked.each)
    known = _earlier(asked.to)
    found = [(each, known[each.key]) for each in runs if each.key in known]
    left = [each for each in runs if each.key not in known]
    work = partial(answer, free=asked.free)
    for each, line in workers.done(left, work, jobs=asked.jobs, limit=asked.limit):
        line = {"kind": "row", **_head(each), **line}
        _print(line, asked.to)
        found.append((each, line))
    predictions = [
        Prediction.of(each.run, line) for each, line in found if "predicted_step_s" in line
    ]
    lines = summaries(predictions)
    for line in lines:
        _print(line, None)
    said = f"{len(rows)} rows, {len(runs)} asked for, {len(predictions)} predicted"
    tables = [table(lines), far(predictions), misfits(predictions)]
    print("\n\n".join([said, *tables, chosen(line for _, line in found)]), file=sys.stderr)
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", type=Path, help="a CSV of published runs, or of profiled times")
    parser.add_argument("--of", nargs="+", default=[""], help="tables whose name has such a word")
    parser.add_argument(
        "--each", type=int, help="rows of every table that ran, and as many that did not"
    )
    parser.add_argument("--to", type=Path, help="append rows here; those that it has are not rerun")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a row may take")
    parser.add_argument("--free", action="store_true", help="also plan without the row's layout")
    return parser.parse_args(argv)


def readable(rows: Sequence[Row]) -> Iterator[Readable]:
    """The rows that can be scored; of each other one a line says why it cannot."""
    seen: set[str] = set()
    for number, row in enumerate(rows, 2):  # as an editor numbers the lines of the file
        key = row.get("run_id") or f"line {number}"
        key = f"{key}, line {number}" if key in seen else key
        seen.add(key)
        try:
            run = read(row)
            if run.seconds is None and run.memory is None and not run.oom:
                raise Unsupported("nothing was measured")
        except Unsupported as reason:
            _print({"kind": "row", "row": key, "unsupported": str(reason)}, None)
        except (ValueError, TypeError, AttributeError) as error:
            why = f"cannot be read: {type(error).__name__}: {error}"
            _print({"kind": "row", "row": key, "unsupported": why}, None)
        else:
            yield Readable(key, run)


def sampled(runs: Sequence[Readable], each: int | None) -> list[Readable]:
    """At most `each` runs of every table, evenly spaced, and as many that ran out of memory."""
    groups: dict[tuple[str, bool], list[Readable]] = defaultdict(list)
    for found in runs:
        groups[found.run.table, found.run.oom].append(found)
    return [
        group[n * len(group) // count]
        for group in groups.values()
        for count in (min(each or len(group), len(group)),)
        for n in range(count)
    ]


def answer(each: Readable, *, free: bool) -> Line:
    """What the tool says of a row, or why it says nothing."""
    run = each.run
    try:
        own = tool.own_layout(run)
        line = {
            "layout": own.layout,
            "predicted_step_s": own.seconds,
            "error": own.seconds / run.seconds - 1 if run.seconds else None,
            "bubble": own.bubble,
            "needed_bytes": own.needed,
            "capacity_bytes": own.capacity,
            "fits": own.fits,
            "bytes": own.bytes,
            "replaced": tool.replaced(run),
        }
        return {**line, "free": _free(run)} if free else line
    except (Unsupported, AutopipeError) as reason:
        return {"refused": str(reason).partition("\n")[0]}
    except Exception as error:  # a bug of the tool is a row's result too
        return {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}


def _free(run: Run) -> Line:
    try:
        return asdict(tool.free_choice(run))
    except AutopipeError as reason:
        return {"refused": str(reason).partition("\n")[0]}


def _head(each: Readable) -> Line:
    run = each.run
    return {
        "row": each.key,
        "table": run.table,
        "model": run.name,
        "software": run.software.name,
        "published_step_s": run.seconds,
        "published_bytes": run.memory,
        "published_oom": run.oom,
    }


def _earlier(path: Path | None) -> dict[str, Line]:
    """The rows that a file has from an earlier run, by their keys."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {line["row"]: line for line in lines if line.get("kind") == "row"}


def _print(line: Line, path: Path | None) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
