"""Where the files of a command are: those it reads, and the folders of those it writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from autopipe import files
from autopipe.cli.console import tell
from autopipe.errors import ModelError, PlanError

if TYPE_CHECKING:
    from autopipe.plan import Plan


def check_folder(file: Path | None) -> None:
    """Refuse a file that is to be written in the end where there is no folder for it.

    Raises:
        AutopipeError: names the folder.
    """
    if file is not None:
        files.check_folder(file)


def relative(source: str, folder: Path) -> str:
    """A model file's path as the plan keeps it: from the plan's own folder."""
    if ":" in source and not Path(source).exists():
        return source
    return os.path.relpath(Path(source).resolve(), folder)


def found(plan: Plan, path: Path, command: str) -> str:
    """The plan's model file, from the plan's own folder."""
    if plan.source is None:
        raise PlanError(
            f"plan.source: {path} does not say where its model is",
            hint=f"autopipe {command} {path} --model FILE",
        )
    if ":" in plan.source:
        return plan.source
    source = path.resolve().parent / plan.source
    if not source.is_file():
        raise ModelError(
            f"plan.source: there is no model file {plan.source!r} in the folder of {path}",
            hint=f"autopipe {command} {path} --model FILE",
        )
    return str(source)


def say_edits(plan: Plan) -> None:
    """Say so if a plan was changed by hand; also under `--quiet`."""
    from autopipe.plan import on_edits

    edits = on_edits(plan)
    if edits is not None:
        tell(edits)
