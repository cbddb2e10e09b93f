"""Explain a plan as text for a terminal: one screen, with more behind options.

    what was decided       the split, the schedule, the predicted step and MFU, memory by part
    where a step goes      a bar for each part, from the devices' peak down to waiting
    the stages             a table, and what its columns are
    one step               drawn to scale, with its legend
    why                    what binds, and the next best two

`--stages` has what each stage holds and sends, `--why` all other meshes that were considered.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from autopipe.planfile.again import folded, repeated
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Transfer
from autopipe.report import facts, paper, schedule_page, spending
from autopipe.report.figures import figures, legend, margins
from autopipe.report.megatron_terms import describe
from autopipe.util import numbers
from autopipe.util.numbers import count, ranges

NEAREST = 2
"""The number of other meshes for which the screen has room."""


def explain(
    plan: Plan, columns: int = paper.WIDTH, *, stages: bool = False, why: bool = False
) -> str:
    """Explain the plan as text of at most `columns` columns.

    Args:
        stages: all rows of the table, and of each stage its nodes, parameters and transfers.
        why: all other meshes, and how sure the planner is.
    """
    parts = [
        paper.terms(facts.decided(plan), columns),
        "\n".join(spending.picture(plan, columns)),
        "\n".join(_figures(plan, columns, stages)),
        "\n".join(_step(plan, columns)),
        *(["\n".join(_held(plan, columns))] if stages else []),
        "\n".join(_why(plan, columns, why)),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _figures(plan: Plan, columns: int, all_of_them: bool) -> Iterator[str]:
    """The table of the stages, and what its columns are."""
    stage_figures = figures(plan, all_of_them=all_of_them)
    table, fits = stage_figures.table, all_of_them or paper.fits(stage_figures.table, columns)
    yield paper.table(table if fits else table.columns(range(stage_figures.parts)), columns)
    meanings = legend(plan, stage_figures.unit, parts=fits)
    if stage_figures.folded:
        meanings["a-b"] = "least and most of stages that differ; --stages shows each"
    yield paper.legend(meanings, columns)
    room = margins(plan)
    if room is not None and all_of_them:
        yield paper.paragraph(room, columns)


def _step(plan: Plan, columns: int) -> Iterator[str]:
    """The lines of a picture of one predicted step, to scale."""
    found = schedule_page.step(plan, columns)
    if found is None:
        return
    total = plan.batch.micro_batches
    of = f", {found.shown} of {total} micro-batches" if found.shown < total else ""
    yield f"one step of a pipeline, to scale{of}:"
    yield found.picture
    yield paper.legend(found.legend, columns)


def _held(plan: Plan, columns: int) -> Iterator[str]:
    """The lines that tell each stage's nodes, parameters and sends; stages alike share theirs."""
    for _, run in groupby(range(len(plan.stages)), key=lambda index: _look(plan, index)):
        yield from _stages([*run], plan, columns)
    for line in describe(plan):
        yield paper.paragraph(line, columns, "    ")


def _look(plan: Plan, index: int) -> Hashable:
    """A key of the stages whose lines differ only in the numbers in names."""
    stage = plan.stages[index]
    sends = [
        replace(
            sent,
            name="",
            peer=sent.peer - index,
            part_of=sent.part_of and replace(sent.part_of, tensor=""),
        )
        for sent in stage.sends
    ]
    again = [str(own) for own in repeated(plan, [stage])]
    names = re.sub(r"\d+", "", " ".join((stage.first, stage.last, *again)))
    return stage.nodes, len(stage.parameters), tuple(sends), names, len(stage.offload)


def _stages(run: Sequence[int], plan: Plan, columns: int) -> Iterator[str]:
    """Stages that look the same: the first of them, for all."""
    stage = plan.stages[run[0]]
    holds = f"{count(stage.nodes, 'node')}, {count(len(stage.parameters), 'parameter tensor')}"
    if len(run) == 1:
        yield f"stage {run[0]}: {holds}"
    else:
        yield paper.paragraph(f"stages {ranges(run)}: {holds} each; stage {run[0]}:", columns)
    yield from _lines(f"from {stage.first}", columns)
    yield from _lines(f"to   {stage.last}", columns)
    for transfer in stage.sends:
        yield from _sent(transfer, columns)
    for own in repeated(plan, [stage]):
        yield from _lines(f"recomputed in backward: {own.where()}", columns)
    if stage.offload:
        spent = stage.predicted.spent
        waits = spent.copying if spent is not None else 0.0
        left = f", {numbers.seconds(waits)} a micro-batch waited for" if waits else ""
        yield from _lines(f"kept in the host's memory: {folded(stage.offload)}{left}", columns)


def _lines(text: str, columns: int) -> Iterator[str]:
    yield paper.paragraph(f"  {text}", columns, "    ")


def _sent(sent: Transfer, columns: int) -> Iterator[str]:
    back = ", its gradient comes back" if sent.gradient else ""
    yield from _lines(f"sends {sent.text} to stage {sent.peer}{back}", columns)


def _why(plan: Plan, columns: int, every: bool) -> Iterator[str]:
    """The lines that tell why this is the plan: what limits it, and what the other meshes cost."""
    pairs = [("why", plan.planner.binding)]
    crossing = facts.crossing(plan)
    if crossing is not None:
        pairs.append(("links", crossing))
    others = facts.alternatives(plan)
    shown = others if every else others[:NEAREST]
    words = ["next best", *("" for _ in shown[1:])]
    pairs += [(word, f"{mesh}: {step}") for word, (mesh, step) in zip(words, shown, strict=False)]
    if len(others) > len(shown):
        pairs.append(("", f"{len(others) - len(shown)} more, shown by --why"))
    yield paper.terms(pairs, columns)
    if every:
        yield paper.paragraph(facts.searched(plan), columns)
