"""Write tracks as a file for ui.perfetto.dev: slices, arrows between ranks, counters.

    rank 0: stage 0, replica 0
        steps               |step 4 --------------------------------------------
        compute             |forward 0 |forward 1 |                    |backward 0
        waits                                     |wait for gradients 0|
        transfers                      |send activations 0
        sums                            |
    rank 1: stage 1, replica 0          v
        compute                         |forward 0 |backward 0         |forward 1
        activations, stage 0 to 1      |--|               from SEND until it is there
        in flight, stage 1               1                            0 1

A slice that is clicked on has its sentence, `waiting for the gradients of micro-batch 0 from stage
1`, and its instruction as a plan's programs have it, `0WAIT_B0<1`.

The format is Chrome's "Trace Event Format" (Google, 2016,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), and this is how
Perfetto reads it (github.com/google/perfetto, src/trace_processor/importers):

- The slices of a thread follow each other or nest. Transfers that are under way at once do neither,
  so they are asynchronous slices.
- An arrow whose end stands in a slice that began before the one of its start is turned round: so
  would be one from a SEND to a WAIT that has begun before. Its end therefore stands before a slice,
  that of the computation after the WAIT.
- A slice's colour comes from its name without the digits, which is its kind. `cname` is what
  Chrome's older viewer (chrome://tracing) goes by.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from autopipe.planfile.contents import Plan
from autopipe.report.tracks import Arrival, Event, Track, TrackedStep, bubbles, walls
from autopipe.schedules.instructions import Flow, Kind
from autopipe.schedules.phrases import describe, short
from autopipe.util import atomic_file

WAITED = 20e-6
"""Seconds from which on a wait is drawn: a shorter one has only found that all was there."""


def about(plan: Plan, name: str) -> dict[str, str]:
    """Facts about the plan to store in the file; `name` is the plan's file name."""
    mesh = plan.mesh
    return {
        "plan": name,
        "schedule": plan.schedule,
        "mesh": f"pp={mesh.pp} dp={mesh.dp} tp={mesh.tp}",
        "micro-batches": str(plan.batch.micro_batches),
        **{f"version of {what}": version for what, version in plan.versions.items()},
    }


def save(path: Path, tracks: Sequence[Track], about: Mapping[str, str]) -> None:
    """Write `text` beside `path` and rename; compressed if the name ends in `.gz`.

    Raises:
        AutopipeError: the file cannot be written; then nothing is left behind.
    """
    data = text(tracks, about).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)  # no time in it: the same tracks are the same bytes
    atomic_file.write(data, path)


def text(tracks: Sequence[Track], about: Mapping[str, str]) -> str:
    """The JSON text of a file with these tracks: one event a line, in the order of time.

    Times are in microseconds from the first event of all. Tracks of several runs may stand in one
    file, a predicted step below a measured one.

    Args:
        about: more facts about the run, by name.
    """
    page = _Page(min((step.start for track in tracks for step in track.steps), default=0.0))
    moves = list(enumerate(_moves(tracks), 1))
    seconds = walls(tracks)
    arrows = {(move.source, move.send): number for number, move in moves if move.ordered}
    for pid, track in enumerate(tracks, 1):
        page.name(pid, track)
        for step in track.steps:
            _draw_step(page, pid, step, seconds[track.pipeline, step.number], arrows)
            _draw_flying(page, pid, step)
    for number, move in moves:
        _draw_move(page, number, move)
    idle = {
        f"bubble of {track}": f"{bubble:.1%}"
        for track, bubble in zip(tracks, bubbles(tracks), strict=True)
    }
    head = {"displayTimeUnit": "ms", "otherData": {**about, **idle}}
    rows = [json.dumps(row) for _, _, row in sorted(page.rows, key=lambda row: row[:2])]
    return json.dumps(head)[:-1] + ', "traceEvents": [\n' + ",\n".join(rows) + "\n]}\n"


class _Move(NamedTuple):
    """A transfer: both of its sides, each with its process, and when the tensors were there."""

    source: int
    send: Event
    target: int
    wait: Event
    arrival: float

    @property
    def ordered(self) -> bool:
        """Whether it arrives after it was sent, by the clocks of two ranks, which may differ."""
        return self.wait.end >= self.send.start


def _moves(tracks: Sequence[Track]) -> Iterator[_Move]:
    """Each SEND with the WAIT of the same pipeline, step, channel and micro-batch.

    A SEND or WAIT without its other side in the recording is left out.
    """
    sends: dict[Hashable, tuple[int, Event]] = {}
    for kind in (Kind.SEND, Kind.WAIT):
        for pid, track in enumerate(tracks, 1):
            for step in track.steps:
                for event in step.events:
                    if event.instruction.kind is kind:
                        moved = Arrival(event.instruction.channel, event.instruction.microbatch)
                        key = track.pipeline, step.number, moved
                        if kind is Kind.SEND:
                            sends[key] = pid, event
                        elif key in sends:
                            arrival = step.arrivals.get(moved, event.end)
                            yield _Move(*sends[key], pid, event, arrival)


_THREADS = ("steps", "compute", "waits", "transfers", "sums")

_SHOWN = {  # the thread of each kind, and its colour from Catapult's tracing/base/color_scheme.html
    Kind.FORWARD: ("compute", "thread_state_running"),
    Kind.BACKWARD: ("compute", "rail_response"),
    Kind.BACKWARD_INPUT: ("compute", "thread_state_runnable"),
    Kind.BACKWARD_WEIGHT: ("compute", "rail_load"),
    Kind.WAIT: ("waits", "terrible"),
    Kind.FREE: ("waits", "bad"),
    Kind.STEP: ("waits", "terrible"),
    Kind.POST: ("transfers", "grey"),
    Kind.SEND: ("transfers", "yellow"),
    Kind.REDUCE: ("sums", "olive"),
}

# Perfetto binds an arrow while it reads: its start to the slice that has begun last on the thread,
# its end to the one that begins next. So the rows of one instant stand in this order, and those of
# one turn in the order in which they were added.
_NAMED, _SENT, _USED, _DRAWN = range(4)


@dataclass
class _Page:
    """The rows of one file, each with its nanosecond and its order among rows of equal time.

    Nanoseconds are whole, so that a slice that begins when another ends still does in the file.
    """

    origin: float
    rows: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)

    def at(self, seconds: float) -> int:
        return round((seconds - self.origin) * 1e9)

    def add(self, turn: int, seconds: float, pid: int, thread: str, **row: Any) -> None:
        """A row of one instant; the number of a thread is its own in the whole file."""
        at, tid = self.at(seconds), 10 * pid + _THREADS.index(thread)
        self.rows.append((at, turn, {**row, "ts": at / 1000, "pid": pid, "tid": tid}))

    def slice(self, pid: int, thread: str, name: str, start: float, end: float, **row: Any) -> None:
        dur = (self.at(end) - self.at(start)) / 1000
        turn = _SENT if thread == "transfers" else _DRAWN
        self.add(turn, start, pid, thread, ph="X", name=name, cat=thread, dur=dur, **row)

    def name(self, pid: int, track: Track) -> None:
        """The names of a rank and of its threads, and that they are shown in this order."""
        self._name(pid, 10 * pid, "process", str(track), pid)
        for number, thread in enumerate(_THREADS):
            self._name(pid, 10 * pid + number, "thread", thread, number)

    def _name(self, pid: int, tid: int, what: str, name: str, place: int) -> None:
        for key, value in (("name", name), ("sort_index", place)):
            row = {"ph": "M", "name": f"{what}_{key}", "args": {key: value}}
            self.rows.append((0, _NAMED, {**row, "pid": pid, "tid": tid}))


def _draw_step(
    page: _Page, pid: int, step: TrackedStep, wall: float, arrows: Mapping[tuple[int, Event], int]
) -> None:
    """A rank's slices, one for the whole step above them, and the starts of its arrows."""
    args: dict[str, object] = {"bubble": round(step.bubble(wall), 4)}
    name = f"step {step.number}"
    page.slice(pid, "steps", name, step.start, step.end, cname="generic_work", args=args)
    armed = [event for event in step.events if event.instruction.kind is Kind.REDUCE]
    others = [event for event in step.events if event.instruction.kind is not Kind.REDUCE]
    sums = step.sums or [Event(reduce, start, step.end) for reduce, start, _ in armed]
    for event in (*others, *sums):
        instruction, start, end = event
        thread, colour = _SHOWN[instruction.kind]
        if thread == "waits" and end - start < WAITED:
            continue
        args = {
            "what": describe(instruction),
            "stage": instruction.stage,
            "microbatch": instruction.microbatch,
            "instruction": str(instruction),
        }
        page.slice(pid, thread, short(instruction), start, end, cname=colour, args=args)
        if (pid, event) in arrows:
            arrow = _named(arrows[pid, event], event)
            page.add(_SENT, start, pid, thread, ph="s", **arrow)


def _draw_flying(page: _Page, pid: int, step: TrackedStep) -> None:
    """How many micro-batches each stage holds: from F on, until B or, split in two, W has ended."""
    held: dict[int, int] = defaultdict(int)
    for (kind, stage, *_), start, end in step.events:
        if kind is Kind.FORWARD:
            at, change = start, 1
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            at, change = end, -1
        else:
            continue
        held[stage] += change
        name, args = f"in flight, stage {stage}", {"micro-batches": held[stage]}
        page.add(_DRAWN, at, pid, "compute", ph="C", name=name, args=args)


def _draw_move(page: _Page, number: int, move: _Move) -> None:
    """A transfer, from its SEND until it is there, and the end of its arrow."""
    named, start = _named(number, move.send), move.send.start
    waited = move.wait.end - move.wait.start >= WAITED
    args = {"microbatch": move.send.instruction.microbatch, "waited": waited}
    there = max(move.arrival, start)
    page.add(_SENT, start, move.target, "waits", ph="b", **named, args=args)
    page.add(_DRAWN, there, move.target, "waits", ph="e", **named)
    if move.ordered:
        page.add(_USED, move.wait.end, move.target, "compute", ph="f", **named)


def _named(number: int, send: Event) -> dict[str, object]:
    """What all rows of a transfer have in common; viewers put those of one name together."""
    source, target, flow = send.instruction.channel
    what = "activations" if flow is Flow.ACTIVATION else "gradients"
    return {"id": number, "cat": "transfer", "name": f"{what}, stage {source} to {target}"}
