"""The command `autopipe explain`: a plan file -> text, HTML or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopipe.terminal import console
from autopipe.terminal.commands import Json, PlanArgument, command
from autopipe.terminal.console import say
from autopipe.terminal.paths import check_file, say_edits


@command("autopipe explain plan.json")
def explain(
    plan: PlanArgument,
    stages: Annotated[
        bool, typer.Option("--stages", help="Show each stage's nodes, parameters and transfers.")
    ] = False,
    why: Annotated[
        bool, typer.Option("--why", help="Show every other mesh that was considered.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write all of it as a page to this file, too.")
    ] = None,
    json: Json = False,
) -> None:
    """Show a plan on a screen: what was decided, where a step goes, and why it is this one.

    --json gives `plan`, the file's own content, and `figures`: degrees, MFU and rates, the step's
    seconds by what they go to, the fullest device, and of each stage its seconds, its bubble and
    its bytes by part.
    """
    from autopipe.planfile.contents import Plan
    from autopipe.report import as_json, paper
    from autopipe.report.explain import explain as explanation
    from autopipe.util import atomic_file

    check_file(html, plan)
    loaded = Plan.load(plan)
    say_edits(loaded)
    if json:
        console.show(as_json.whole(loaded))
    else:
        print(explanation(loaded, paper.width(), stages=stages, why=why), end="")
    if html is not None:
        from autopipe.page.contents import contents_of
        from autopipe.page.write import page

        atomic_file.write(page(contents_of(loaded, plan.name)), html)
        say(f"{html}: open it in a browser")
    elif not (json or stages or why):
        say("\nmore: --stages (nodes, parameters, what is sent), --why, --html FILE (a page)")
