"""The command line: `python -m benchmarks.planning [case ...]`, a JSON line for each case."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.planning.case import CASES, run


def main(argv: list[str] | None = None) -> int:
    """Run the cases; the exit code is 1 if one takes longer or more memory than it should."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning",
        description="From the start of `autopipe plan` to the plan file: seconds and memory.",
    )
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all")
    parser.add_argument("--table", type=Path, help="the rows of an earlier run as a table")
    chosen = parser.parse_args(argv)
    if chosen.table:
        print(table([json.loads(line) for line in chosen.table.read_text().splitlines()]))
        return 0
    unknown = sorted(set(chosen.cases) - set(CASES))
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}: they are {', '.join(CASES)}")
    late = False
    for name in chosen.cases or CASES:
        row = run(name)
        print(json.dumps(row), flush=True)
        late |= any(
            row[limit] is not None and row[found] > row[limit]
            for found, limit in (("wall", "limit"), ("rss_gib", "memory"))
        )
    return int(late)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as they stand in the README."""
    lines = [
        "| case | wall s | at most | CPU s | peak GiB | load | phases | plan | file |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spent = ", ".join(f"{name} {seconds}" for name, seconds in row["phases"].items())
        lines.append(
            f"| {row['case']} | {row['wall']} | {row['limit'] or ''} | {row['cpu']} "
            f"| {row['rss_gib']} | {row['load']} | {spent} | {row['plan']} "
            f"| {row['file_bytes'] / 1e6:.2f} MB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
