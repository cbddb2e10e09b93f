"""The command `autopipe emit`: a plan file -> a folder of Python files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from autopipe.errors import AutopipeError
from autopipe.terminal.commands import PlanArgument, command
from autopipe.terminal.console import say
from autopipe.terminal.paths import FOLDERS, as_asked, check_folder, model_source, relative
from autopipe.util.gc_pause import loading


@command("autopipe emit plan.json -o out")
def emit(
    plan: PlanArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the folder, whole.")] = False,
    model: Annotated[str | None, typer.Option(help="The model file, if it has moved.")] = None,
) -> None:
    """Write what a plan runs as Python to read, edit and run: stages, programs, train.py."""
    with loading():
        from autopipe.emit.emit import emit as write
        from autopipe.frontend import model_file
        from autopipe.planfile.contents import Plan

    check_folder(output)
    loaded = Plan.load(plan)
    source = model or model_source(loaded, plan, "emit")
    _check_replaced(output, plan, source)
    there = relative(source, output.resolve())
    file = model_file.load(source)
    write(
        file.model,
        loaded,
        as_asked(output),
        inputs=file.example_for(loaded),
        loss=file.loss,
        source=there,
        force=force,
    )
    if loaded.lengths[1:]:
        *shorter, longest = map(str, loaded.lengths)
        others = ", ".join(shorter)
        say(f"its files take rows of {longest} tokens alone, and refuse the plan's {others}")
    processes = len(loaded.mesh.places)
    script = shlex.quote(str(output / "train.py"))
    say(f"run it: torchrun --nproc-per-node {processes} {script}")
    print(output)


def _check_replaced(output: Path, plan: Path, source: str) -> None:
    """Refuse a file, and a folder that holds what is read: `--force` would remove it as well, but
    for a plan that is written there again.

    Raises:
        AutopipeError: names the plan or the model file.
    """
    if output.is_file():
        raise AutopipeError(f"-o {output}: expected a folder, found a file", hint="-o out")
    folder = output.resolve()
    for path in (plan, Path(source.removeprefix(FOLDERS).partition("?")[0]).expanduser()):
        own = path.parent.resolve() / path.name  # a link in the folder goes with it
        inside = path.exists() and folder in (own, *own.parents)
        if inside and own != folder / "plan.json":
            raise AutopipeError(
                f"-o {output}: the folder is replaced whole, and {path} is in it",
                hint="-o out, or another folder of its own",
            )
