"""The command `autopipe simulate`: a plan or a schedule -> a drawing of one step."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from autopipe.errors import AutopipeError
from autopipe.terminal import console
from autopipe.terminal.commands import Json, command
from autopipe.terminal.console import say
from autopipe.terminal.option_groups import given
from autopipe.terminal.paths import check_file, say_edits
from autopipe.util import numbers


@dataclass(frozen=True)
class ShapeOptions:
    """The shape of a drawn step (`report.schedule_page.Shape`); None: the one that is usual."""

    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks of the pipeline; 4.")] = None
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Equal parts of a step's batch; 8.")
    ] = None
    chunks: Annotated[
        int | None, typer.Option(min=2, help="Stages on each rank, for interleaved; 2.")
    ] = None
    forward: Annotated[
        float | None,
        typer.Option(min=0, max=1e9, help="Time of a micro-batch's forward on a rank; 1."),
    ] = None
    backward: Annotated[
        float | None, typer.Option(min=0, max=1e9, help="Time of its backward; 2.")
    ] = None
    latency: Annotated[
        float | None,
        typer.Option(min=0, max=1e9, help="Time of a transfer between ranks, one way; 0."),
    ] = None
    wire: Annotated[
        float | None,
        typer.Option(min=0, max=1e9, help="Time for which a transfer keeps its link; 0."),
    ] = None
    window: Annotated[
        int | None,
        typer.Option(
            min=1, help="Micro-batches that a rank lets its sender send ahead of need; 2."
        ),
    ] = None
    depth: Annotated[
        int | None,
        typer.Option(min=0, help="Micro-batches in flight beyond 1f1b's, for eager-1f1b; 1."),
    ] = None


@command("autopipe simulate 1f1b --ranks 4 --micro-batches 8")
def simulate(
    what: Annotated[
        str | None,
        typer.Argument(help="a plan, a schedule's name or its file; without it every schedule"),
    ] = None,
    *,
    shape: ShapeOptions,
    waits: Annotated[bool, typer.Option("--waits", help="Draw waits, as dots.")] = False,
    transfers: Annotated[bool, typer.Option("--transfers", help="Draw transfers.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file, too.")] = None,
    json: Json = False,
) -> None:
    """Draw a step, proved and timed by its longest path; of a plan, the one it predicts.

    Times are in whatever unit one likes; those of a plan are seconds. --json gives `steps`, one for
    each schedule: seconds, bubble, of every rank the spans with their start and end, and transfers.
    """
    from autopipe.planfile.contents import Plan, names_plan
    from autopipe.report import as_json, paper, schedule_page
    from autopipe.report import draw_svg as pictures
    from autopipe.schedules.registry import SCHEDULES
    from autopipe.util import atomic_file

    options = given(shape)
    if svg is not None and what is None:
        raise AutopipeError(
            "--svg makes one picture, and no schedule was named",
            hint=f"autopipe simulate 1f1b --svg {shlex.quote(str(svg))}",
        )
    check_file(svg, what)
    if what is not None:
        schedule_page.check(what, options)
    columns, timelines = paper.width(schedule_page.WIDTH), []
    planned = what is not None and names_plan(what)
    shown = {"planned": planned, "waits": waits, "transfers": transfers}
    steps: list[dict[str, Any]] = []
    for name in [what] if what is not None else SCHEDULES:
        if planned:
            loaded = Plan.load(name)
            say_edits(loaded)
            timeline = schedule_page.of_plan(loaded)
            if loaded.loss_seconds:
                took = numbers.seconds(loaded.loss_seconds)
                say(f"drawn without the loss of the whole batch, {took} between its two passes")
        else:
            timeline = schedule_page.of_schedule(name, schedule_page.Shape(**options))
        timelines.append(timeline)
        if json:
            steps.append(as_json.of_timeline(name, timeline))
        else:
            print(schedule_page.describe(name, timeline, columns, **shown), end="\n\n")
        if svg is not None:
            atomic_file.write(pictures.svg(timeline, Path(name).name, planned=planned), svg)
    if json:
        console.show({"steps": steps})
    else:
        print(schedule_page.key(timelines, columns, **shown))
