"""The contents of a page, as data: headline, charts, tables, and the sheets for its sliders.

Plan, Sheets, Recording  --contents_of-->  Contents  --write.page-->  HTML
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from autopipe.page import advice, losses, memory, steps, waterfall
from autopipe.page.advice import Advice
from autopipe.planfile.again import repeated, words
from autopipe.planfile.contents import Plan, on_edits
from autopipe.planfile.waterfall import mfu, tokens_per_second
from autopipe.planfile.waterfall import waterfall as waterfall_of
from autopipe.report import facts, fullest
from autopipe.report.figures import figures, legend, margins
from autopipe.report.megatron_terms import describe
from autopipe.report.paper import Table
from autopipe.report.recorded import Recording
from autopipe.scaling import links
from autopipe.scaling.sheet import Sheet
from autopipe.scaling.stops import Stops
from autopipe.util import numbers
from autopipe.util.numbers import count

MEMORY_SHARES = tuple(sixteenth / 16 for sixteenth in range(4, 33))
"""Of the memory that each device has, the limits at which a slider stops."""


@dataclass(frozen=True)
class Headline:
    """A figure in large letters, with words below it and the planned figure or a share `beside`."""

    figure: str
    words: str
    beside: str = ""


@dataclass(frozen=True)
class Captioned:
    """A table of texts; `words` are the columns of words, the others hold figures."""

    caption: str
    names: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class StageWords:
    """A description of a stage: a title, and terms with their texts."""

    title: str
    terms: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Sliders:
    """The sheets that the page's script evaluates, and the stops of its sliders.

    Attributes:
        sheets: the plan's is the first.
        link: the places that the farthest link joins; empty: it has no slider.
        room: bytes of the plan's fullest device, which the memory slider stands for.
        why_no_tokens: as a sentence; empty if tokens are a slider.
    """

    sheets: tuple[Sheet, ...]
    stops: Stops
    link: str
    bandwidth: float
    room: int
    why_no_tokens: str

    def data(self) -> dict[str, Any]:
        """The contents as data for JSON."""
        plan = self.sheets[0]
        return {
            "sheets": [asdict(sheet) for sheet in self.sheets],
            "stops": {
                "rows": self.stops.rows,
                "tokens": self.stops.tokens,
                "bandwidths": self.stops.bandwidths,
                "batches": self.stops.batches,
                "memory": [round(self.room * share) for share in MEMORY_SHARES],
            },
            "planned": {
                "tokens": plan.tokens,
                "bandwidth": self.bandwidth,
                "batch": plan.rows * plan.dp * plan.micro_batches,
                "room": self.room,
            },
        }


@dataclass(frozen=True)
class Contents:
    """A page; a part that is None is left out."""

    title: str
    kind: str
    edits: str
    headlines: tuple[Headline, ...]
    decided: tuple[tuple[str, str], ...]
    waterfall: waterfall.Waterfall
    advice: tuple[Advice, ...]
    memory: memory.MemoryChart
    step: steps.Picture
    losses: losses.Curve | None
    sliders: Sliders | None
    stages: tuple[Captioned, ...]
    legend: tuple[tuple[str, str], ...]
    margins: str
    why: tuple[str, ...]
    others: Captioned | None
    searched: str
    held: tuple[StageWords, ...]
    tensor_parallel: str


def contents_of(
    plan: Plan,
    title: str,
    sheets: tuple[Sheet, ...] = (),
    stops: Stops | None = None,
    why_no_tokens: str = "",
    run: Recording | None = None,
) -> Contents:
    """The contents of the page of a plan, or of a run of it.

    Args:
        title: the name of the plan's file.
        sheets, stops: those of the plan and its rivals; empty: the page has no sliders.

    Raises:
        ScheduleError: the plan's programs cannot run to their end.
    """
    measured = run.measured if run is not None else None
    sheet = sheets[0] if sheets else None
    table = figures(plan, all_of_them=True)
    others = facts.alternatives(plan)
    parts = waterfall_of(plan)
    advice_of_run = advice.of_run(plan, parts, measured) if measured is not None else []
    return Contents(
        title=title,
        kind="a plan, before it runs" if run is None else "a run, compared with its plan",
        edits=on_edits(plan) or "",
        headlines=tuple(_headlines(plan, run)),
        decided=tuple(facts.decided(plan)),
        waterfall=waterfall.of_plan(plan, parts, measured),
        advice=(*advice_of_run, *advice.of_plan(plan, parts)),
        memory=memory.of_plan(plan, sheet, measured),
        step=steps.of_plan(plan, run.lanes if run is not None else None),
        losses=losses.of_metrics(run.metrics) if run is not None else None,
        sliders=None if stops is None else _sliders(plan, sheets, stops, why_no_tokens),
        stages=tuple(_stages(table.table, table.parts - 1, table.unit)),
        legend=tuple(legend(plan, table.unit).items()),
        margins=margins(plan) or "",
        why=(plan.planner.binding, *filter(None, [facts.crossing(plan)])),
        others=_others(others),
        searched=facts.searched(plan),
        held=tuple(_stage_words(plan, index) for index in range(len(plan.stages))),
        tensor_parallel="\n".join(describe(plan)),
    )


def _headlines(plan: Plan, run: Recording | None) -> Iterator[Headline]:
    step, rank = plan.prediction.step_seconds, fullest.fullest(plan)
    measured = run.measured if run is not None else None
    if measured is not None and measured.step_seconds:
        planned = f"planned {numbers.seconds(step)}"
        yield Headline(numbers.seconds(measured.step_seconds), "a step, measured", planned)
    else:
        pace = f"{numbers.rate(plan.batch.rows / step)} rows/s" if step else ""
        yield Headline(numbers.seconds(step), "a step, predicted", pace)
    tokens, reached = tokens_per_second(plan), mfu(plan)
    ratio = step / measured.step_seconds if measured and measured.step_seconds else 1.0
    if tokens is not None:
        of_all = f"{numbers.rate(tokens * ratio * len(plan.mesh.places))} of all"
        yield Headline(numbers.rate(tokens * ratio), "tokens/s a device", of_all)
    if reached is not None and plan.work is not None:
        dtype = plan.work.dtype
        peak = f"of {dtype} as measured" if plan.work.measured else f"of the datasheet's {dtype}"
        yield Headline(numbers.percent(reached * ratio), "MFU", peak)
    held = rank.held
    if measured is not None:
        held = sum(measured.stages[stage].memory.peak for stage in rank.stages) or held
    may = f"of {numbers.memory(rank.room)}" if rank.room is not None else ""
    yield Headline(numbers.memory(held), "on the fullest device", may)
    bubble = numbers.percent(plan.prediction.bubble)
    if measured is not None and measured.step_seconds:
        bubble_measured = waterfall.bubble(plan, measured)
        yield Headline(numbers.percent(bubble_measured), "bubble, measured", f"planned {bubble}")
    else:
        yield Headline(bubble, "bubble, predicted")


def _sliders(plan: Plan, sheets: tuple[Sheet, ...], stops: Stops, why_no_tokens: str) -> Sliders:
    farthest = links.farthest(plan.cluster)
    rooms = [rank.room for rank in sheets[0].ranks]
    return Sliders(
        sheets,
        stops,
        farthest.words if len(stops.bandwidths) > 1 else "",
        farthest.link.bandwidth,
        max(rooms),
        why_no_tokens,
    )


def _stages(table: Table, first: int, unit: str) -> Iterator[Captioned]:
    """The seconds and the bytes of the stages in a table each; the peak begins what is bytes."""
    every = range(len(table.names))
    for columns, caption in (
        (every[:first], "Time: one micro-batch on each stage"),
        (every[first:], f"Memory of a device, in {unit}"),
    ):
        part = table.columns(columns)
        yield Captioned(caption, part.names, part.rows, (part.names[0], *part.left))


def _others(others: list[tuple[str, str]]) -> Captioned | None:
    names = ("plan", "why not")
    caption = "Other plans that were considered, the nearest first"
    return Captioned(caption, names, tuple(others), names) if others else None


def _stage_words(plan: Plan, index: int) -> StageWords:
    stage = plan.stages[index]
    pairs = [("from", stage.first), ("to", stage.last)]
    for sent in stage.sends:
        back = ", its gradient comes back" if sent.gradient else ""
        pairs.append(("sends", f"{sent.text} to stage {sent.peer}{back}"))
    for group in repeated(plan, [stage]):
        ops = f"{words(group.ops)} of " if group.ops else ""
        pairs.append(("runs again", ops + ", ".join(group.blocks)))
    pairs.append(("parameters", ", ".join(stage.parameters)))
    parameters = count(len(stage.parameters), "parameter tensor")
    title = f"stage {index}: {count(stage.nodes, 'node')}, {parameters}"
    return StageWords(title, tuple(pairs))
