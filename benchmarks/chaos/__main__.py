"""The command line: every kind of instruction, every event, every rank, one run after another.

python -m benchmarks.chaos > rows.jsonl
python -m benchmarks.chaos --kinds WAIT --events stop --ranks 0 3 --launchers torchrun
python -m benchmarks.chaos --table rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Any

from autopipe.schedules.instructions import Kind
from benchmarks.chaos.case import KINDS, MESHES, broken, make
from benchmarks.chaos.harm import EVENTS, Harm
from benchmarks.chaos.story import LAUNCHERS, SIZE, tell

STEP = 2
"""The step that a rank comes to harm in: the third."""

Row = dict[str, Any]

_KINDS = [kind.value for kind in Kind]


def main(argv: list[str] | None = None) -> int:
    """Run what the arguments name, a row each; the exit code is 1 if a promise was broken."""
    chosen = arguments().parse_args(argv)
    if chosen.table:
        print(table([json.loads(line) for line in chosen.table.read_text().splitlines()]))
        return 0
    failed = 0
    for row in rows(chosen):
        print(json.dumps(row), flush=True)
        failed += bool(row["broken"])
    return int(failed > 0)


def arguments() -> argparse.ArgumentParser:
    """What can be asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description="What becomes of a run when one of its ranks comes to harm.",
    )
    add = parser.add_argument
    add("--schedules", nargs="+", choices=list(MESHES), default=list(MESHES))
    add("--kinds", nargs="+", choices=_KINDS, default=_KINDS)
    add("--events", nargs="+", choices=list(EVENTS), default=list(EVENTS))
    add("--ranks", nargs="+", type=int, choices=range(SIZE), default=list(range(SIZE)))
    add("--launchers", nargs="+", choices=list(LAUNCHERS), default=list(LAUNCHERS), help="in turn")
    add("--table", type=Path, help="the rows of an earlier run as a table; runs nothing")
    return parser


def rows(chosen: argparse.Namespace) -> Iterator[Row]:
    """A run for every rank, kind and event; plans and launchers take turns."""
    turn = count()
    with tempfile.TemporaryDirectory() as folder:
        plans = {schedule: make(schedule, Path(folder)) for schedule in chosen.schedules}
        for rank, kind, event in product(chosen.ranks, chosen.kinds, chosen.events):
            those = [schedule for schedule in plans if kind in KINDS[schedule]]
            if not those:
                continue
            number = next(turn) + rank  # or an event would meet one launcher on every rank
            schedule = those[number % len(those)]
            launcher = chosen.launchers[number % len(chosen.launchers)]
            yield row(plans[schedule], schedule, launcher, kind, event, rank)


def row(plan: Path, schedule: str, launcher: str, kind: str, event: str, rank: int) -> Row:
    """One run."""
    known = {"schedule": schedule, "launcher": launcher, "rank": rank, "kind": kind, "event": event}
    with tempfile.TemporaryDirectory() as folder:
        try:
            story = tell(plan, launcher, Harm(rank, STEP, kind, event, folder))
        except TimeoutError as error:
            return {**known, "broken": [str(error)]}
    return {
        **known,
        "instruction": str(story.instruction),
        "told": round(min(story.told, default=-1.0), 3),
        "ended": round(story.ended, 3),
        "closed": round(story.closed, 3),
        "codes": story.codes,
        "load": round(os.getloadavg()[0], 1),
        "broken": broken(story, launcher),
        "said": [line for _, line in story.lines] if broken(story, launcher) else [],
    }


def table(found: Sequence[Row]) -> str:
    """Medians, the worst in brackets: by kind of instruction, and by launcher."""
    lines = []
    for by in ("kind", "launcher"):
        lines += [f"| {by} | event | runs | promise kept | told | ended | closed |"]
        lines += ["|---|---|---|---|---|---|---|"]
        values = sorted({r[by] for r in found}, key=[*_KINDS, *LAUNCHERS].index)
        for value, event in product(values, EVENTS):
            some = [r for r in found if r[by] == value and r["event"] == event]
            if some:
                kept = sum(not r["broken"] for r in some)
                times = " | ".join(_times(some, what) for what in ("told", "ended", "closed"))
                lines += [f"| {value} | {event} | {len(some)} | {kept} | {times} |"]
        lines += [""]
    return "\n".join(lines)


def _times(some: Sequence[Row], what: str) -> str:
    seconds = [r[what] for r in some if what in r]
    return f"{median(seconds):.2f} ({max(seconds):.2f})" if seconds else ""


if __name__ == "__main__":
    sys.exit(main())
