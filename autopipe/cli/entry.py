"""Run a command line, and turn its errors into sentences and exit codes."""

from __future__ import annotations

import functools
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from autopipe.errors import AutopipeError
from autopipe.terminal import console, usage
from autopipe.terminal.commands import EXAMPLES, FUNCTIONS, app, with_talk
from autopipe.terminal.console import tell
from autopipe.util.version import untried_torch

# The commands, in the order of use, which is that of `--help`.
from autopipe.cli import init as init  # isort: skip
from autopipe.cli import model as model  # isort: skip
from autopipe.cli import plan_model as plan_model  # isort: skip
from autopipe.cli import explain as explain  # isort: skip
from autopipe.cli import simulate as simulate  # isort: skip
from autopipe.cli import report as report  # isort: skip
from autopipe.cli import check as check  # isort: skip
from autopipe.cli.running import run as run  # isort: skip
from autopipe.cli import export as export  # isort: skip
from autopipe.cli import checkpoint as checkpoint  # isort: skip
from autopipe.cli import emit as emit  # isort: skip
from autopipe.cli import diff as diff  # isort: skip
from autopipe.cli import probe as probe  # isort: skip


def _version(asked: bool) -> None:
    """autopipe's version, torch's and Python's; torch is not imported for it."""
    if not asked:
        return
    found = []
    for package in ("autopipe", "torch"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} (not installed as a package)")
    print(", ".join([*found, f"Python {platform.python_version()}"]))
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show versions, and end.", callback=_version, is_eager=True),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No talk on stderr but errors; of any command.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show where in the code an error arose; of any command."),
    ] = False,
) -> None:
    """Split an unmodified PyTorch model over the devices at hand, and run it."""
    console.ask(debug=debug, quiet=quiet)


def main() -> None:
    """The entry point: an error that the user can fix prints a sentence and exits with code 2."""
    _call(app, "autopipe", sys.argv[1:])


def program(function: Callable[..., None]) -> None:
    """Run a function as the program of every rank; its arguments are the options.

    Its errors are printed as those of `autopipe run`.
    """
    from autopipe.runtime.launch import voice, world

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> None:
        with voice.one_voice(world.world_from(os.environ), debug=console.debug()):
            function(*args, **kwargs)

    cli = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    cli.command()(with_talk(wrapper))
    _call(cli, Path(sys.argv[0]).name, sys.argv[1:], function)


def _call(
    command: typer.Typer,
    name: str,
    argv: Sequence[str],
    function: Callable[..., None] | None = None,
) -> None:
    """Run a command and end, unless it ends by itself.

    Args:
        function: what it runs; None: the argv says.
    """
    console.forget()
    console.open_streams()
    try:
        usage.check_words(next((f"{name} {w}" for w in argv if w in FUNCTIONS), name), argv)
        try:
            code = command(args=list(argv), prog_name=name, standalone_mode=False)
        except OSError as error:
            if error.filename is None:
                console.flush_data("\n")  # if stdout is why, this fails as well, and says so
            raise
        console.flush_data()
    except (AutopipeError, usage.UsageError) as error:
        _end(_mistake(error, name, argv, function))
    except typer.Abort:
        sys.exit(130)
    except Exception as error:  # whatever else: not a user's mistake
        if console.debug():
            raise
        _end(error)
    if isinstance(code, int) and code:
        sys.exit(code)


def _mistake(
    error: Exception, name: str, argv: Sequence[str], function: Callable[..., None] | None
) -> AutopipeError:
    """An error of the user's as a sentence."""
    if console.debug():
        traceback.print_exc()
    if isinstance(error, AutopipeError):
        return error
    word = next((word for word in argv if word in FUNCTIONS), None)
    if function is not None or word is None:
        return usage.sentence(error, name, argv, function, f"{name} --help")
    return usage.sentence(error, f"{name} {word}", argv, FUNCTIONS[word], EXAMPLES[word])


def _end(error: Exception) -> None:
    """Print an error and exit: with code 2 if the user can mend it, else with 1."""
    from autopipe.runtime.launch import voice, watchdog  # it knows which rank speaks, and of whom
    from autopipe.runtime.launch.words import sentence

    if isinstance(error, AutopipeError):
        tell(f"error: {voice.who()}{error.message}")
        if error.hint is not None:
            tell(f"\nhint: {error.hint}")
    else:
        found = watchdog.verdict(error)  # it has the rank, the step and the instruction
        what = found.text if found is not None else f"{voice.who()}{sentence(error)}"
        hint = "--debug shows where"
        if "InductorError" in what:  # of torch's compiler: the stage may run well without it
            hint += "; torch.compile fails here, and a plan made with --no-compile does without"
        tell(f"error: {what}\n\nhint: {hint}")
    if (untried := untried_torch()) is not None:
        tell(f"note: {untried}")
    sys.exit(voice.code(error))
