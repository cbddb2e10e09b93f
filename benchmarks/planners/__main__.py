"""The command line: Piper's and Galvatron's published problems, a row each, ours beside theirs.

python -m benchmarks.planners FOLDER > rows.jsonl
python -m benchmarks.planners --table rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.planners.cases import Row, rows


def main(argv: list[str] | None = None) -> int:
    """Plan every problem; the exit code is 1 if a row says that something is wrong with a plan."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planners",
        description="Other planners' published problems: their plans, and autopipe's.",
    )
    parser.add_argument("path", type=Path, help="a folder with piper/ and galvatron/")
    parser.add_argument("--table", action="store_true", help="path has rows: print them as a table")
    chosen = parser.parse_args(argv)
    if chosen.table:
        print(table([json.loads(line) for line in chosen.path.read_text().splitlines()]))
        return 0
    wrong = False
    for row in rows(chosen.path):
        print(json.dumps(row), flush=True)
        wrong = wrong or bool(row["wrong"])
    return int(wrong)


def table(found: Sequence[Row]) -> str:
    """The rows as Markdown, first those whose plans autopipe could have."""
    return "\n\n".join(
        _table([row for row in found if bool(row["unsupported"]) is apart])
        for apart in (False, True)
    )


def _table(found: Sequence[Row]) -> str:
    lines = [
        "| case | theirs | ours | ratio | CPU s, theirs | CPU s, ours | their plan | our plan |",
        "|---" * 8 + "|",
    ]
    for row in found:
        lines.append(
            f"| {row['case']} | {_told(row['theirs'], '.6g')} | {_told(row['ours'], '.6g')} "
            f"| {_told(row['ratio'], '.4f')} | {row['cpu_theirs']} | {row['cpu_ours']:.2f} "
            f"| {row['plan_theirs']} | {row['plan_ours']} |"
        )
    return "\n".join(lines)


def _told(figure: float | None, form: str) -> str:
    return "" if figure is None else format(figure, form)


if __name__ == "__main__":
    sys.exit(main())
