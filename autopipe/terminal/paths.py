"""Find the files that a command reads, and check the folders of files that it writes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from autopipe.errors import AutopipeError, ModelError, PlanError
from autopipe.terminal.console import tell
from autopipe.util import atomic_file

if TYPE_CHECKING:
    from autopipe.planfile.contents import Plan


FOLDERS = "hf:"
"""The prefix of a model argument that names a folder of transformers (`frontend.hf_folder`)."""


_BEGAN: list[Path] = []
"""The folder in which this command was called: the last one, where tests call several."""


def begin() -> None:
    """Note the folder in which a command is called, before a model file may call `os.chdir`."""
    with suppress(FileNotFoundError):  # it was removed: paths in it say so
        _BEGAN[:] = [Path.cwd()]


def as_asked(path: Path) -> Path:
    """The path that the user meant by it where the command was called; unchanged while this
    process is still there."""
    return path if not _BEGAN or Path.cwd() == _BEGAN[0] else _BEGAN[0] / path


def standing(source: str) -> str:
    """A model argument that is read more than once: a file's path from the root on."""
    return str(Path(source).absolute()) if Path(source).is_file() else source


def check_folder(path: Path | None) -> None:
    """Refuse, before long work, an output path whose folder is not there or takes no files.

    Raises:
        AutopipeError: names the folder.
    """
    if path is not None:
        atomic_file.check_folder(path)


def check_file(path: Path | None, read: str | Path | None = None) -> None:
    """The same of a path that a file will be written to: a folder is refused too, and the very file
    that the command reads.

    Args:
        read: the argument for that file, which may be no path at all: `package.module:factory`.

    Raises:
        AutopipeError: names the folder, or the file.
    """
    check_folder(path)
    if path is not None and path.is_dir():
        raise AutopipeError(f"{path} cannot be written: it is a folder", hint="name a file in it")
    if path is not None and read is not None and _is_file(Path(read)) and path.exists():
        if path.samefile(read):
            raise AutopipeError(
                f"{path} cannot be written: it is the file that is read", hint="name another file"
            )


def relative(source: str, folder: Path) -> str:
    """A model file's path relative to the plan's folder, as the plan stores it."""
    from autopipe.planfile.contents import names_module

    if source.startswith(FOLDERS):
        path, mark, query = source.removeprefix(FOLDERS).partition("?")
        return FOLDERS + os.path.relpath(Path(path).expanduser().resolve(), folder) + mark + query
    if names_module(source) and not Path(source).exists():
        return source
    file = Path(source)  # of a link the plan has its own name, which ends as a model's does
    return os.path.relpath(file.parent.resolve() / file.name, folder)


def model_source(plan: Plan, path: Path, command: str) -> str:
    """Find the plan's model file, relative to the folder of the plan file at `path`."""
    from autopipe.planfile.contents import names_module

    if plan.source is None:
        raise PlanError(
            f"plan.source: {path} does not say where its model is",
            hint=f"autopipe {command} {path} --model FILE",
        )
    if plan.source.startswith(FOLDERS):
        return f"{FOLDERS}{path.resolve().parent / plan.source.removeprefix(FOLDERS)}"
    if names_module(plan.source):
        return plan.source
    source = path.resolve().parent / plan.source
    if not _is_file(source):
        raise ModelError(
            f"plan.source: there is no model file {plan.source!r} in the folder of {path}",
            hint=f"autopipe {command} {path} --model FILE",
        )
    return str(source)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file system takes
        return False


def say_edits(plan: Plan) -> None:
    """Warn if a plan was changed by hand; also with `--quiet`."""
    from autopipe.planfile.contents import on_edits

    edits = on_edits(plan)
    if edits is not None:
        tell(edits)
