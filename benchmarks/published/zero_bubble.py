"""Bubble rates of schedules from profiled times, beside those of the zero-bubble paper.

    bubble = 1 - m (F + I + W) / cost        cost: the longest of a rank from first F to last W

(Qi et al., 2024, arXiv:2401.10241, section 5.3, tables 5 and 9). All stages take the same; a
transfer takes T_comm from the end of one pass to the start of the next rank's, whatever else
runs. A backward in one is I + W. 1F1B-I has as many chunks a rank as it has layers, so each takes
that part of F, I and W. ZB-H2 (`zb_2p`) is no schedule with a name in autopipe: it is handed over
written out, as a user's own would be.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping

from autopipe.schedules import registry
from autopipe.schedules.instructions import COMPUTE, Instruction, Kind, Programs
from autopipe.schedules.simulate import Costs, LinkTime, Timeline, simulate

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
    programs = programs_of(schedule, ranks, micro_batches, chunks)
    return 1 - micro_batches * (f + i + w) / longest(simulate(programs, costs))


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


def longest(timeline: Timeline) -> float:
    """The most seconds from a rank's first computing to its last.

    Ranks begin the next step without waiting for each other (Qi et al., 2024, arXiv:2401.10241,
    section 4), so the paper's rates leave out what a rank waits before its first forward.
    """
    times: dict[int, list[float]] = {}
    for span in timeline.spans:
        if span.instruction.kind in COMPUTE:
            times.setdefault(span.rank, []).extend((span.start, span.end))
    return max(max(found) - min(found) for found in times.values())


def programs_of(schedule: str, ranks: int, micro_batches: int, chunks: int = 1) -> Programs:
    """autopipe's programs, and those of `zb-2p`."""
    if schedule == "zb-2p":
        return zb_2p(ranks, micro_batches)
    return registry.make(schedule, ranks, micro_batches, chunks=chunks)


def zb_2p(ranks: int, micro_batches: int) -> Programs:
    """ZB-H2 of Qi et al., section 2.2: twice the activations of 1F1B, and no bubble inside.

    Two ranks, F = I = W:

        rank 0: F0 F1 F2 I0 W0 F3 I1 W1 ..
        rank 1:    F0 I0 F1 I1 F2 I2 W0 ..

    Rank i of p starts with 2 (p - 1 - i) forwards, runs W 2 i micro-batches behind I, and so holds
    2p - 1 micro-batches.
    """
    programs = []
    for rank in range(ranks):
        f, i, w = (
            iter([Instruction(kind, rank, k) for k in range(micro_batches)])
            for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        )
        programs.append(
            (
                *_turns(2 * (ranks - 1 - rank), f),
                *_turns(2 * rank, f, i),
                *_turns(micro_batches, f, i, w),
            )
        )
    return tuple(programs)


def _turns(times: int, *rows: Iterator[Instruction]) -> Iterator[Instruction]:
    """So many times the next one of each row; a row that has ended is passed over."""
    for _ in range(times):
        for row in rows:
            yield from itertools.islice(row, 1)
