"""The command `autopipe init`: writes a model file to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from autopipe.errors import AutopipeError
from autopipe.terminal.commands import command
from autopipe.terminal.console import say
from autopipe.terminal.contract import CONTRACT, template
from autopipe.terminal.paths import check_folder
from autopipe.util import atomic_file


@command("autopipe init model.py", more=CONTRACT)
def init(
    file: Annotated[Path, typer.Argument(help="the file to write")] = Path("model.py"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a model file to begin with, every part explained."""
    if file.is_dir():
        raise AutopipeError(
            f"{file}: expected the name of a file to write, found a folder",
            hint=f"autopipe init {shlex.quote(str(file / 'model.py'))}",
        )
    if file.suffix != ".py":
        raise AutopipeError(
            f"{file}: expected a name that ends in .py, as `autopipe plan` asks of a model file",
            hint=f"autopipe init {shlex.quote(str(file.with_suffix('.py')))}",
        )
    if file.exists() and not force:
        raise AutopipeError(
            f"{file} is there already",
            hint="another name, or --force, which replaces it",
        )
    check_folder(file)
    atomic_file.write(template(file.name), file)
    say(f"next: autopipe plan {shlex.quote(str(file))}")
    print(file)
