"""The command line: every model tried, one process each; a JSON line for each way to split one.

python -m benchmarks.zoo --to rows.jsonl                  one of each family; goes on where it ends
python -m benchmarks.zoo --to rows.jsonl --all            all tasks, all variants
python -m benchmarks.zoo --to rows.jsonl --only bert,gpt  models with one of these in their names
python -m benchmarks.zoo --list
python -m benchmarks.zoo.table rows.jsonl

`benchmarks.zoo.ranks` tries the same models on ranks that are processes, on a GPU too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

from benchmarks.zoo.hub.kernels import importable

WAYS = ("pp2", "pp4", "tp2", "torch")


def main(argv: list[str] | None = None) -> int:
    """Try what is asked for and not yet in the file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--to", type=Path, help="the file of rows; what stands in it is not tried again")
    add("--only", default="", help="parts of names, with commas between")
    add("--all", action="store_true", help="all tasks of a family, not one of each")
    add("--jobs", type=int, default=2, help="models at a time")
    add("--limit", type=float, default=60.0, help="seconds of a core for one model")
    add("--ways", default=",".join(WAYS), help="how to split")
    add("--sample", type=int, help="so many of the models alone, at random")
    add("--list", action="store_true", help="print the names alone")
    chosen = parser.parse_args(argv)
    importable()  # before transformers is
    from benchmarks.zoo import catalogue, workers

    subjects = catalogue.named(chosen.only, chosen.all or bool(chosen.only))
    if chosen.list:
        print("\n".join(subject.name for subject in subjects))
        return 0
    if chosen.to is None:
        parser.error("--to names the file that rows are written to")
    done = set()
    if chosen.to.exists():
        done = {json.loads(line)["model"] for line in chosen.to.read_text().splitlines()}
    left = [subject for subject in subjects if subject.name not in done]
    random.Random(0).shuffle(left)  # so that a run that is cut short is a fair sample
    left = left[: chosen.sample]
    begin = time.monotonic()
    with chosen.to.open("a") as file:
        ways = tuple(chosen.ways.split(","))
        for number, rows in enumerate(workers.tried(left, ways, chosen.jobs, chosen.limit), 1):
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            outcomes = ", ".join(f"{row['what']} {row['outcome']}" for row in rows)
            spent = time.monotonic() - begin
            print(
                f"{number}/{len(left)} {spent:.0f} s  {rows[0]['model']}: {outcomes}",
                file=sys.stderr,
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
