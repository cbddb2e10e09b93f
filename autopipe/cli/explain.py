"""`autopipe explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopipe.cli import console
from autopipe.cli.commands import Json, PlanArgument, command
from autopipe.cli.console import say
from autopipe.cli.paths import check_folder, say_edits


@command("autopipe explain plan.json")
def explain(
    plan: PlanArgument,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with a picture to this file, too.")
    ] = None,
    json: Json = False,
) -> None:
    """Show a plan to a person: stages, timeline, and why it is this one.

    --json gives `plan`, the file's own content, and `figures`: degrees, seconds and bubble of the
    step, and of each stage its seconds, its bubble and its bytes by part.
    """
    from autopipe import as_json, files
    from autopipe import explain as words
    from autopipe.plan import Plan

    check_folder(html)
    loaded = Plan.load(plan)
    say_edits(loaded)
    if json:
        console.show(as_json.whole(loaded))
    else:
        words.console().print(words.explain(loaded))
    if html is not None:
        files.write(words.page(loaded, plan.name), html)
        say(f"{html}: open it in a browser")
