"""Draw a schedule, given by name, file or plan, as a timeline with a headline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from autopipe.errors import ScheduleError
from autopipe.planfile import predict
from autopipe.planfile.contents import Plan, names_plan
from autopipe.planfile.parts import Batch
from autopipe.report import draw_text as picture
from autopipe.report import paper
from autopipe.schedules import user_schedule
from autopipe.schedules.instructions import COMPUTE, Programs, holders, stages_of
from autopipe.schedules.lanes import sends_for
from autopipe.schedules.registry import SCHEDULES, flying, make
from autopipe.schedules.simulate import Costs, LinkTime, Timeline, simulate
from autopipe.schedules.transfers import Edge, insert
from autopipe.util import numbers

WIDTH = 110
"""The largest width of a drawing, in columns."""


@dataclass(frozen=True)
class Shape:
    """The sizes and costs of a schedule drawn without a plan; seconds are in any one unit.

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


def check(what: str, options: Mapping[str, object]) -> None:
    """Refuse options that would not change the drawing.

    Args:
        what: a schedule's name, or a file with one or with a plan.
        options: the fields of a `Shape` that the user has set.

    Raises:
        ScheduleError: names the first such field.
    """
    if what not in SCHEDULES and not Path(what).exists():
        return  # which is worse
    if names_plan(what):
        settled, hint = {field.name for field in fields(Shape)}, "a plan is drawn as it is"
    elif what not in SCHEDULES:
        settled, hint = {"ranks", "micro_batches", "chunks", "depth"}, "the file says it"
    else:
        takes = {"chunks": SCHEDULES[what].chunks is None, "depth": SCHEDULES[what].depths}
        settled = {name for name, is_taken in takes.items() if not is_taken}
        hint = "chunks are for interleaved, a depth is for eager-1f1b"
    for name in options:
        if name in settled:
            raise ScheduleError(
                f"--{name.replace('_', '-')} {options[name]} makes no difference to {what}",
                hint=hint,
            )


def of_schedule(what: str, shape: Shape) -> Timeline:
    """The timeline of a schedule given by its name or by a file.

    Raises:
        ScheduleError: there is none of that name, the file is none, or it waits for itself.
    """
    if what in SCHEDULES:
        chunks = SCHEDULES[what].chunks or shape.chunks
        _check_size(shape, chunks)
        depths = (shape.depth,) * (shape.ranks - 1) if SCHEDULES[what].depths else ()
        compute = make(what, shape.ranks, shape.micro_batches, chunks=chunks, depths=depths)
    else:
        compute = from_file(Path(what))
    stages = len(holders(compute))
    chunks = stages // len(compute)
    chain = [Edge(stage, stage + 1, gradient=True) for stage in range(stages - 1)]
    ahead = sends_for([shape.depth] if what in SCHEDULES and SCHEDULES[what].depths else [])
    programs = insert(compute, chain, [shape.window] * (stages - 1), ahead)
    link = LinkTime(shape.latency, bandwidth=1.0, bytes=shape.wire)
    costs = Costs.even(stages, shape.forward / chunks, shape.backward / chunks, link)
    return simulate(programs, costs)


MOST = 250_000
"""Forwards of a step that is proved and drawn in some ten seconds."""


def _check_size(shape: Shape, chunks: int) -> None:
    forwards = shape.ranks * chunks * shape.micro_batches
    if forwards > MOST:
        on_each = f" with {chunks} stages each" if chunks > 1 else ""
        raise ScheduleError(
            f"--ranks {shape.ranks} --micro-batches {shape.micro_batches}: expected at most "
            f"{MOST:,} forwards to draw, found {forwards:,}: {shape.micro_batches:,} on each of "
            f"{shape.ranks:,} ranks{on_each}",
            hint="fewer of either: a step repeats itself between its warm-up and its cool-down",
        )


def from_file(path: Path) -> Programs:
    """Read a user's schedule from a file: `rank 0: 0F0 0F1 ...`, one line a rank.

    Raises:
        ScheduleError: there is no such file, or it is no schedule.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # as `json_text.parse` reads a plan
    except (OSError, UnicodeDecodeError) as error:
        missing = isinstance(error, FileNotFoundError)
        why = "of that name" if missing else f"that can be read: {error}"
        raise ScheduleError(
            f"there is no schedule {str(path)!r}, and no file {why}",
            hint=f"one of {', '.join(SCHEDULES)}, or a file with a line for each rank: "
            "`rank 0: 0F0 0B0 0F1 0B1`",
        ) from error
    try:
        return user_schedule.parse(text)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error.message}", hint=error.hint) from error


def of_plan(plan: Plan) -> Timeline:
    """The timeline that a plan predicts for its step."""
    return predict.timeline(plan)


def describe(
    name: str,
    timeline: Timeline,
    columns: int = WIDTH,
    *,
    planned: bool = False,
    waits: bool,
    transfers: bool,
) -> str:
    """A headline, a drawing and the meanings of its letters.

    Args:
        planned: times are a plan's, in seconds. Those of a schedule by itself are in whatever the
            costs of its forwards and backwards are in.
    """
    held = []
    for program in timeline.programs:
        held.append(" + ".join(str(flying(program, stage)) for stage in stages_of(program)))
    micro_batches = 1 + max(i.microbatch for program in timeline.programs for i in program)
    step = numbers.seconds(timeline.seconds) if planned else f"{timeline.seconds:.4g} units"
    head = (
        f"{name}: {numbers.count(len(timeline.programs), 'rank')}, "
        f"{numbers.count(micro_batches, 'micro-batch', 'micro-batches')}; a step takes {step}, "
        f"{numbers.percent(timeline.bubble)} of it bubble"
    )
    most = f"micro-batches held by each rank: {', '.join(held)}"
    text = drawing(timeline, columns, waits=waits, transfers=transfers)
    return "\n".join((*(paper.paragraph(line, columns) for line in (head, most)), text))


def key(
    timelines: Sequence[Timeline],
    columns: int = WIDTH,
    *,
    planned: bool,
    waits: bool,
    transfers: bool = False,
) -> str:
    """The meanings of the letters of these timelines' drawings, and the unit of their times."""
    words: dict[str, str] = {}
    cut = any(
        picture.is_cut(drawing(timeline, columns, waits=waits, transfers=transfers), timeline)
        for timeline in timelines
    )
    for timeline in timelines:
        words |= picture.legend(timeline, waits=waits, cut=cut)
    if not planned:
        words["a unit"] = (
            "that of --forward (1 without it), --backward (2), --latency (0) and --wire (0)"
        )
    return paper.legend(words, columns)


def drawing(
    timeline: Timeline, page: int = WIDTH, *, waits: bool = False, transfers: bool = False
) -> str:
    """Draw the timeline as text for `page` columns, with labels shortened as needed."""
    for columns in (page, 2 * WIDTH):
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
    """Seconds of the shortest compute that takes time: a label is as wide."""
    lengths = [s.end - s.start for s in timeline.spans if s.instruction.kind in COMPUTE]
    return min((length for length in lengths if length > 0), default=1.0)


@dataclass(frozen=True)
class Drawn:
    """A step on a page.

    Attributes:
        shown: micro-batches of it, from the first on.
        picture: lines, one for each rank.
        legend: the meanings of the letters.
    """

    shown: int
    picture: str
    legend: dict[str, str]


def step(plan: Plan, columns: int) -> Drawn | None:
    """Draw the step that a plan predicts, at most `columns` characters wide.

    None: some stage takes no time, or there is no pipeline.

    Of as many micro-batches as fit, so that one sees warm-up, steady state and cool-down. Where
    those would be too few, labels are cut, and of a long pipeline the first and the last ranks are
    rows of letters.
    """
    predicted = [stage.predicted for stage in plan.stages]
    if len(plan.stages) == 1 or not all(
        min(s.forward_seconds, s.backward_seconds) > 0 for s in predicted
    ):
        return None
    total, pp = plan.batch.micro_batches, plan.mesh.pp
    rows = plan.batch.rows // total
    most, few = min(total, 2 * pp + 2), min(total, 3)
    if plan.programs:  # a written schedule is for its own number of micro-batches
        most = few = total

    @cache
    def timeline(shown: int) -> Timeline:
        return predict.timeline(replace(plan, batch=Batch(rows * shown, shown)))

    def drawn(shown: int, labels: int) -> str | None:
        return fitting(timeline(shown), labels * shortest(timeline(shown)), columns)

    for labels in (1, 2) if pp <= MOST_RANKS else ():
        shown = _largest(few, most, lambda shown: drawn(shown, labels) is not None)  # noqa: B023
        picture_of = drawn(shown, labels) if shown else None
        if picture_of is not None:
            cut = picture.is_cut(picture_of, timeline(shown))
            return Drawn(shown, picture_of, picture.legend(timeline(shown), cut=cut))
    whole_step = timeline(most)
    ranks = range(pp) if pp <= MOST_RANKS else (0, 1, pp - 2, pp - 1)
    meanings = picture.legend(whole_step)
    letters = {letter: text for letter, text in meanings.items() if len(letter) == 1}
    each = numbers.seconds(whole_step.seconds / columns)
    letters |= {"a letter": f"what takes most of about {each}", "blank": meanings["blank"]}
    return Drawn(most, picture.strip(whole_step, columns, ranks), letters)


MOST_RANKS = 8
"""Rows that a screen has room for."""


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, if all below one that does do too; 0: not even `low`."""
    if not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
