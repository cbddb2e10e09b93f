"""Rows as tables: how many are right in each group, and the causes of the rest.

python -m benchmarks.zoo.table rows.jsonl [later.jsonl ...]     a later row of a model counts
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[dict[str, Any]]

GROUPED = re.compile(r"'[^']*'|`[^`]*`|\d[\d.e+-]*|\S+\.py:\d+:? ?|\([^)]*\)")
"""What differs between sentences of one cause: names, numbers, places."""


def group(row: dict[str, Any]) -> str:
    """`transformers/causal`, or the library alone."""
    library, _, rest = str(row["model"]).partition("/")
    return f"{library}/{rest.rpartition('/')[2]}" if library == "transformers" else library


def outcomes(rows: Rows) -> Iterator[str]:
    """A line a group: of the models that were built, how many are right, each way to split."""
    ways = [way for way in dict.fromkeys(row["what"] for row in rows) if way != "build"]
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[group(row)].append(row)
        groups["**all**"].append(row)
    order = sorted(groups, key=lambda name: (name == "**all**", name))
    yield f"| models | built | {' | '.join(ways)} | bitwise at pp2 | wrong | s, median |"
    yield "|---" * (len(ways) + 5) + "|"
    for name in order:
        of_it = groups[name]
        tried = {row["model"] for row in of_it}
        built = tried - {row["model"] for row in of_it if row["what"] == "build"}
        cells = [name, f"{len(built)} of {len(tried)}"]
        for way in ways:
            some = [row for row in of_it if row["what"] == way]
            right = sum(row["outcome"] == "right" for row in some)
            cells.append(f"{right} of {len(some)}, {right / max(len(some), 1):.1%}")
        cells.append(str(sum(bool(row["bitwise"]) for row in of_it if row["what"] == "pp2")))
        wrong = [r for r in of_it if r["outcome"] == "wrong" and r["what"] != "torch"]
        cells.append(str(len(wrong)))
        seconds: Counter[str] = Counter()
        for row in of_it:
            seconds[row["model"]] += row["seconds"]
        cells.append(f"{sorted(seconds.values())[len(seconds) // 2]:.1f}")
        yield f"| {' | '.join(cells)} |"


def causes(rows: Rows) -> Iterator[str]:
    """A line for each cause of what is not right, the most frequent first."""
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    first: dict[tuple[str, str], str] = {}
    for row in rows:
        if row["outcome"] != "right" and row["what"] != "torch":
            key = row["outcome"], GROUPED.sub("...", row["cause"])[:80]
            found[key][row["model"]].append(row["what"])
            first.setdefault(key, row["cause"])
    yield "| outcome | models | of them | cause |"
    yield "|---|---|---|---|"
    for key, models in sorted(found.items(), key=lambda item: -len(item[1])):
        named = ", ".join(f"{name} {'+'.join(ways)}" for name, ways in list(models.items())[:6])
        named += ", ..." if len(models) > 6 else ""
        cause = first[key].replace("|", "\\|")
        yield f"| {key[0]} | {len(models)} | {named} | {cause} |"


def bytes_off(rows: Rows) -> list[str]:
    """Models whose counted bytes are not those of the plan."""
    return [
        f"{row['model']} {row['what']}: {row['predicted']} predicted, {row['counted']} counted"
        for row in rows
        if row.get("counted") is not None and row["counted"] != row["predicted"]
    ]


def newest(rows: Rows) -> Rows:
    """Of each model the rows of its last trial of each way; none of a build that failed before."""
    found = {(row["model"], row["what"]): row for row in rows}
    built = {model for model, what in found if what != "build"}
    return [row for (model, what), row in found.items() if what != "build" or model not in built]


def unexplained(rows: Rows) -> list[str]:
    """Models of whose gradients some differ in a bit, though no sum of them has another order."""
    return [
        f"{row['model']} {row['what']}: {row['unexplained']}"
        for row in rows
        if row.get("unexplained")
    ]


def share_dealt(rows: Rows) -> str:
    """How much of the parameters tensor-parallel ranks have a part of."""
    shares = sorted(row["dealt"] for row in rows if row.get("dealt") is not None)
    if not shares:
        return "Of parameters dealt out: not recorded"
    few = sum(share < 0.5 for share in shares)
    half = shares[len(shares) // 2]
    return f"Of parameters dealt out: {half:.1%} in the median; less than half in {few} models"


def main(paths: Sequence[str]) -> None:
    """Print all of it."""
    lines = [line for path in paths for line in Path(path).read_text().splitlines()]
    rows = newest([json.loads(line) for line in lines])
    compared = [row for row in rows if row.get("counted") is not None]
    off = bytes_off(rows)
    print("\n".join(outcomes(rows)), end="\n\n")
    print(f"Bytes kept for backward: as predicted in {len(compared) - len(off)} of {len(compared)}")
    print("".join(f"  {line}\n" for line in off))
    near = "fp64", "rounding"
    doubled = [
        f"{r['model']} {r['what']}"
        for r in rows
        if any(word in r.get("reference", "") for word in near)
    ]
    print(f"Right in fp64, roundings make more of it in fp32: {len(doubled)}", *doubled)
    odd = unexplained(rows)
    print(f"Gradients that differ in a bit for no known reason: {len(odd)} rows")
    print("".join(f"  {line}\n" for line in odd))
    print(share_dealt(rows), end="\n\n")
    print("\n".join(causes(rows)))


if __name__ == "__main__":
    main(sys.argv[1:])
