"""A schedule on paper: named, from a file or from a plan, as a timeline with a headline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from autopipe import forecast, picture, written
from autopipe.errors import ScheduleError
from autopipe.plan import Plan
from autopipe.schedule import Programs, holders
from autopipe.schedules import SCHEDULES, flying, make
from autopipe.simulate import Costs, Link, Timeline, simulate
from autopipe.transfers import Edge, insert, sends_for

WIDTH = 110
"""Columns that a drawing may take."""


@dataclass(frozen=True)
class Shape:
    """What a schedule without a plan is drawn with; seconds are in whatever unit one likes.

    Attributes:
        ranks, micro_batches, chunks: chunks are stages on each rank, under interleaved.
        forward, backward: seconds of one rank's micro-batch, all its stages together.
        latency: seconds of a transfer, one way.
        wire: seconds for which a transfer keeps its link from the next one.
        window, depth: receives posted ahead and micro-batches in flight besides, at each boundary.
    """

    ranks: int = 4
    micro_batches: int = 8
    chunks: int = 2
    forward: float = 1.0
    backward: float = 2.0
    latency: float = 0.0
    wire: float = 0.0
    window: int = 2
    depth: int = 1


def check(what: str, asked: Mapping[str, object]) -> None:
    """Refuse what makes no difference to a drawing.

    Args:
        what: a schedule's name, or a file with one or with a plan.
        asked: fields of a `Shape` that somebody has set.

    Raises:
        ScheduleError: names the first such field.
    """
    if what not in SCHEDULES and not Path(what).exists():
        return  # which is worse
    if what.endswith(".json"):
        settled, hint = {field.name for field in fields(Shape)}, "a plan is drawn as it is"
    elif what not in SCHEDULES:
        settled, hint = {"ranks", "micro_batches", "chunks", "depth"}, "the file says it"
    else:
        own = {"chunks": SCHEDULES[what].chunks is None, "depth": SCHEDULES[what].depths}
        settled = {name for name, taken in own.items() if not taken}
        hint = "chunks are for interleaved, a depth is for eager-1f1b"
    for name in asked:
        if name in settled:
            raise ScheduleError(
                f"--{name.replace('_', '-')} {asked[name]} makes no difference to {what}", hint=hint
            )


def of_schedule(what: str, shape: Shape) -> Timeline:
    """The timeline of a schedule with a name, or of the file that one is written in.

    Raises:
        ScheduleError: there is none of that name, the file is none, or it waits for itself.
    """
    if what in SCHEDULES:
        chunks = SCHEDULES[what].chunks or shape.chunks
        depths = (shape.depth,) * (shape.ranks - 1) if SCHEDULES[what].depths else ()
        compute = make(what, shape.ranks, shape.micro_batches, chunks=chunks, depths=depths)
    else:
        compute = from_file(Path(what))
    stages = len(holders(compute))
    chunks = stages // len(compute)
    chain = [Edge(stage, stage + 1, gradient=True) for stage in range(stages - 1)]
    ahead = sends_for([shape.depth] if what in SCHEDULES and SCHEDULES[what].depths else [])
    programs = insert(compute, chain, [shape.window] * (stages - 1), ahead)
    link = Link(shape.latency, bandwidth=1.0, bytes=shape.wire)
    costs = Costs.even(stages, shape.forward / chunks, shape.backward / chunks, link)
    return simulate(programs, costs)


def from_file(path: Path) -> Programs:
    """A schedule that a user has written: `rank 0: 0F0 0F1 ...`, a line a rank.

    Raises:
        ScheduleError: there is no such file, or it is no schedule.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        missing = isinstance(error, FileNotFoundError)
        why = "of that name" if missing else f"that can be read: {error}"
        raise ScheduleError(
            f"there is no schedule {str(path)!r}, and no file {why}",
            hint=f"one of {', '.join(SCHEDULES)}, or a file with a line for each rank: "
            "`rank 0: 0F0 0B0 0F1 0B1`",
        ) from error
    try:
        return written.parse(text)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error.message}", hint=error.hint) from error


def of_plan(plan: Plan) -> Timeline:
    """The timeline that a plan predicts for its step."""
    return forecast.timeline(plan)


def describe(name: str, timeline: Timeline, *, waits: bool, transfers: bool) -> str:
    """A headline and a drawing."""
    held = [
        " + ".join(str(flying(program, stage)) for stage in sorted({i.stage for i in program}))
        for program in timeline.programs
    ]
    micro_batches = 1 + max(i.microbatch for program in timeline.programs for i in program)
    head = (
        f"{name}: {len(timeline.programs)} ranks, {micro_batches} micro-batches; a step takes "
        f"{timeline.seconds:.4g}, the bubble is {timeline.bubble:.0%}; micro-batches held by each "
        f"rank: {', '.join(held)}"
    )
    return f"{head}\n{drawing(timeline, waits=waits, transfers=transfers)}"


def drawing(timeline: Timeline, *, waits: bool = False, transfers: bool = False) -> str:
    """The timeline as text that fits the page, as far as labels can be cut."""
    for columns in (WIDTH, 2 * WIDTH):
        for unit in (shortest(timeline), 2 * shortest(timeline), 5 * timeline.seconds / columns):
            text = fitting(timeline, unit, columns, waits=waits, transfers=transfers)
            if text is not None:
                return text
    return picture.draw(timeline, unit or 1.0, waits=waits, transfers=transfers)


def fitting(
    timeline: Timeline, unit: float, columns: int, *, waits: bool = False, transfers: bool = False
) -> str | None:
    """The timeline as text with a label for each `unit` seconds; None if it needs more columns."""
    if _NARROWEST * timeline.seconds > columns * unit:
        return None  # not even drawn: where seconds differ by much it would be a very long line
    text = picture.draw(timeline, unit or 1.0, waits=waits, transfers=transfers)
    return text if max(map(len, text.splitlines())) <= columns else None


_NARROWEST = 3
"""Columns of a label and a space: `F0 `."""


def shortest(timeline: Timeline) -> float:
    """Seconds of the shortest compute that takes any: what a label is as wide as."""
    lengths = [s.end - s.start for s in timeline.spans if s.instruction.flow is None]
    return min((length for length in lengths if length > 0), default=1.0)
