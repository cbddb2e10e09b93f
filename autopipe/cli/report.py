"""The command `autopipe report`: a plan or a run's folder -> one HTML page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopipe.errors import AutopipeError
from autopipe.terminal.commands import command
from autopipe.terminal.console import say
from autopipe.terminal.paths import as_asked, check_file, model_source, say_edits
from autopipe.util.gc_pause import loading

if TYPE_CHECKING:
    from autopipe.planfile.contents import Plan
    from autopipe.planners.formulas.sheets import Sheets
    from autopipe.report.recorded import Recording


@command("autopipe report plan.json")
def report(
    what: Annotated[
        Path, typer.Argument(help="a plan file, or the folder of `autopipe run --record`")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="The page to write; plan.html of plan.json, report.html in a run."
        ),
    ] = None,
    sliders: Annotated[
        bool,
        typer.Option(
            "--sliders/--no-sliders", help="Trace the model again, for the formulas of the sliders."
        ),
    ] = True,
    model: Annotated[str | None, typer.Option(help="The model file, if it has moved.")] = None,
) -> None:
    """Write one page about a plan, before anything is rented, or about a run beside its plan.

    It needs nothing besides itself. Sliders for batch, rows, sequence, link and memory evaluate the
    formulas of the plan and of plans that may beat it; those take the model.
    """
    from autopipe.page.contents import contents_of
    from autopipe.page.write import page
    from autopipe.planfile.contents import Plan
    from autopipe.report import recorded
    from autopipe.util import atomic_file

    run = _recorded(what) if what.is_dir() else None
    path = what / recorded.PLAN if run is not None else what
    plan = run.plan if run is not None else Plan.load(what)
    target = output or (what / "report.html" if run is not None else what.with_suffix(".html"))
    check_file(target, path)
    say_edits(plan)
    found_sheets = _sheets(plan, path, model) if sliders else None
    contents = contents_of(
        plan,
        what.resolve().name,
        found_sheets.sheets if found_sheets is not None else (),
        found_sheets.stops if found_sheets is not None else None,
        found_sheets.why_no_tokens if found_sheets is not None else "",
        run,
    )
    atomic_file.write(page(contents), as_asked(target))
    say("open it in a browser; it needs nothing besides itself")
    print(target)


def _recorded(folder: Path) -> Recording:
    """The run of a folder.

    Raises:
        AutopipeError: it is none of a run's; of checkpoints it names the command for them.
    """
    from autopipe.report import recorded
    from autopipe.runtime.checkpoint.folder import checkpoints_in, is_one

    if is_one(folder) or checkpoints_in(folder):
        raise AutopipeError(
            f"{folder} has checkpoints; a report is of a plan, or of what a run has recorded",
            hint=f"autopipe checkpoint info {shlex.quote(str(folder))}; or "
            "autopipe run plan.json --record FOLDER, and then autopipe report FOLDER",
        )
    return recorded.load(folder)


def _sheets(plan: Plan, path: Path, model: str | None) -> Sheets | None:
    """The sheets of a plan; None, with a line that says why, where its model is not to be had."""
    try:
        source = model or model_source(plan, path, "report")
        with loading():
            from autopipe.frontend import model_file
            from autopipe.planners.formulas.sheets import sheets

        return sheets(plan, model_file.load(source), say)
    except AutopipeError as error:
        if model is not None:
            raise
        say(f"without sliders: {error.message}")
        return None
