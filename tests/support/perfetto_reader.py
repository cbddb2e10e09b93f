"""A reader of Perfetto's trace-event files: slices, arrows and counters."""

import json
from collections import defaultdict
from typing import Any, NamedTuple

from autopipe.report import perfetto
from autopipe.report.tracks import Track


class Slice(NamedTuple):
    process: str
    thread: str
    name: str
    start: float
    end: float
    code: str = ""


class Reader:
    """What Perfetto makes of a file; it refuses what it would show otherwise than it is meant.

    As in its sources, rows are taken one after the other. An arrow's start is bound to the slice
    that has begun last on its thread, its end to the next one that begins there.
    """

    def __init__(self, text: str) -> None:
        self.document = json.loads(text)
        self.slices: list[Slice] = []
        self.arrows: list[tuple[Slice, Slice]] = []
        self.under_way: list[Slice] = []
        self.counts: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._processes: dict[int, str] = {}
        self._threads: dict[int, str] = {}
        self._open: dict[int, list[Slice]] = defaultdict(list)
        self._starts: dict[tuple[Any, ...], Slice] = {}
        self._ends: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        self._transfers: dict[tuple[Any, ...], Slice] = {}
        now = 0.0
        for row in self.document["traceEvents"]:
            assert row["pid"] > 0 and row["tid"] > 0, "0 is the idle process of a machine"
            if row["ph"] != "M":
                assert row["ts"] >= now, "rows stand in the order of their times"
                now = row["ts"]
            getattr(self, f"_{row['ph']}")(row)
        assert not any(self._ends.values()), "arrows that end nowhere"
        assert not self._transfers, "transfers that never arrive"

    def _M(self, row: dict[str, Any]) -> None:
        if row["name"] == "process_name":
            self._processes[row["pid"]] = row["args"]["name"]
        if row["name"] == "thread_name":
            assert row["tid"] not in self._threads, "a thread is of one process"
            self._threads[row["tid"]] = row["args"]["name"]

    def _slice(self, row: dict[str, Any]) -> Slice:
        where = self._processes[row["pid"]], self._threads[row["tid"]]
        end, code = round(row["ts"] + row.get("dur", 0), 3), row.get("args", {}).get("instruction")
        return Slice(*where, row["name"], row["ts"], end, code or "")

    def _X(self, row: dict[str, Any]) -> None:
        found, opened = self._slice(row), self._open[row["tid"]]
        assert row["dur"] >= 0
        while opened and opened[-1].end <= found.start:
            opened.pop()
        assert not opened or found.end <= opened[-1].end, "slices of a thread nest or follow"
        opened.append(found)
        self.slices.append(found)
        for key in self._ends.pop(row["tid"], []):
            self.arrows.append((self._starts.pop(key), found))

    def _s(self, row: dict[str, Any]) -> None:
        self._starts[self._key(row)] = self._open[row["tid"]][-1]

    def _f(self, row: dict[str, Any]) -> None:
        assert "bp" not in row and self._key(row) in self._starts, "an arrow begins before it ends"
        self._ends[row["tid"]].append(self._key(row))

    def _b(self, row: dict[str, Any]) -> None:
        assert self._key(row) not in self._transfers, "an id is of one transfer"
        self._transfers[self._key(row)] = self._slice(row)

    def _e(self, row: dict[str, Any]) -> None:
        begun = self._transfers.pop(self._key(row))
        self.under_way.append(begun._replace(end=row["ts"]))

    def _C(self, row: dict[str, Any]) -> None:
        self.counts[row["name"]].append((row["ts"], row["args"]["micro-batches"]))

    @staticmethod
    def _key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["cat"], row["name"], row["id"]


def read(*tracks: Track) -> Reader:
    return Reader(perfetto.text(tracks, {}))
