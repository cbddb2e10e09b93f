"""Bubble rates of schedules from profiled times, beside those of the zero-bubble paper.

    bubble = 1 - m (F + I + W) / cost        cost: the longest of a rank from first F to last W

(Qi et al., 2024, arXiv:2401.10241, section 5.3, tables 5 and 9). All stages take the same; a
transfer takes T_comm from the end of one pass to the start of the next rank's, whatever else
runs. A backward in one is I + W. 1F1B-I has as many chunks a rank as it has layers, so each takes
that part of F, I and W. ZB-H2 is `pipeline.zb_2p`, which autopipe's runtime does not offer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping

from autopipe.schedules.simulate import Costs, LinkTime, simulate
from benchmarks.published import pipeline

COLUMNS = frozenset(("p", "m", "T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms", "layers"))
"""By which a table of profiled times is known."""

SCHEDULES = {
    "bubble_1F1B": "1f1b",
    "bubble_1F1B-I": "interleaved",
    "bubble_ZB-H1": "zb-h1",
    "bubble_ZB-H2": "zb-2p",
    "bubble_ZB-V": "zb-v",
}
"""autopipe's schedule for each of the paper's."""

SEARCHED = ("bubble_ZB-1p", "bubble_ZB-2p")
"""Schedules that the paper finds by search for each row: beyond scope."""


def bubble(row: Mapping[str, str], schedule: str) -> float:
    """The bubble rate of a schedule with a row's profiled times."""
    ranks, micro_batches = int(row["p"]), int(row["m"])
    each = -(-int(row["layers"]) // ranks)
    chunks = {"interleaved": each, "zb-v": 2}.get(schedule, 1)
    f, i, w = (float(row[name]) / 1e3 for name in ("T_F_ms", "T_B_ms", "T_W_ms"))
    link = LinkTime(latency=float(row["T_comm_ms"]) / 1e3)
    stages = ranks * chunks
    costs = Costs(
        forward=[f / chunks] * stages,
        backward=[(i + w) / chunks] * stages,
        backward_input=[i / chunks] * stages,
        backward_weight=[w / chunks] * stages,
        reduce=[0.0] * stages,
        links=lambda channel: link,
    )
    programs = pipeline.programs_of(schedule, ranks, micro_batches, chunks)
    return 1 - micro_batches * (f + i + w) / pipeline.longest(simulate(programs, costs))


def report(rows: Iterable[Mapping[str, str]]) -> int:
    """Print each bubble rate beside the published one, one JSON object per line."""
    for row in rows:
        for column, schedule in SCHEDULES.items():
            if not row.get(column):
                continue
            found, published = bubble(row, schedule), float(row[column])
            line = {
                "kind": "bubble",
                "model": row["model"],
                "p": int(row["p"]),
                "m": int(row["m"]),
                "schedule": column.removeprefix("bubble_"),
                "simulated": round(found, 4),
                "published": published,
                "difference": round(found - published, 4),
            }
            print(json.dumps(line))
        for column in SEARCHED:
            if row.get(column):
                head = {"kind": "bubble", "model": row["model"], "schedule": column[7:]}
                print(json.dumps({**head, "unsupported": "a schedule that is found by search"}))
    return 0


def main() -> int:
    """`python -m benchmarks.published.zero_bubble zero_bubble_profiled.csv`."""
    import csv

    with open(sys.argv[1], newline="") as file:
        return report(list(csv.DictReader(file)))


if __name__ == "__main__":
    sys.exit(main())
