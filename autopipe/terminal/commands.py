"""The table of commands, with an example for each, and the options common to all."""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from autopipe.errors import AutopipeError
from autopipe.frontend.quiet import command_hushed
from autopipe.terminal import bars, console, paths
from autopipe.terminal.option_groups import KEYWORD_ONLY, spread, with_parameters

Command = TypeVar("Command", bound=Callable[..., None])

ModelArgument = Annotated[
    str, typer.Argument(help="model.py, package.module:factory, or hf:FOLDER")
]
PlanArgument = Annotated[Path, typer.Argument(help="a plan file, as `autopipe plan` writes it")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of text.")]

_Debug = Annotated[
    bool, typer.Option("--debug", help="Show where in the code an error or a warning arose.")
]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No talk on stderr but errors.")]

EXAMPLES: dict[str, str] = {}
"""An example line for each command, in the order of use."""

FUNCTIONS: dict[str, Callable[..., None]] = {}
"""The function of each command, with a parameter for each argument and option."""

_MEANT = {
    **dict.fromkeys(("train", "start", "launch", "execute"), "run"),
    **dict.fromkeys(("split", "search", "auto", "optimize", "partition"), "plan"),
    **dict.fromkeys(("show", "view", "print", "why"), "explain"),
    **dict.fromkeys(("new", "create", "template"), "init"),
    **dict.fromkeys(("draw", "schedule", "timeline"), "simulate"),
    **dict.fromkeys(("write", "codegen"), "emit"),
    **dict.fromkeys(("submit", "sbatch", "script", "manifest"), "export"),
    **dict.fromkeys(("compare", "difference"), "diff"),
    **dict.fromkeys(("measure", "benchmark", "bench"), "probe"),
    **dict.fromkeys(("graph", "capture"), "trace"),
}
"""Other words for a command -> the command's name here."""


class _Table(TyperGroup):
    """All commands, each with its example; a word that is none is answered with the one meant."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands, in the order of use"):
            for name, example in EXAMPLES.items():
                what = (FUNCTIONS[name].__doc__ or "").partition("\n")[0]
                formatter.write(f"  {name:9} {what}\n{'':12}$ {example}\n")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            raise unknown_command(name, self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def unknown_command(name: str, known: list[str]) -> AutopipeError:
    """The error for an unknown command; it suggests the nearest known one."""
    close = difflib.get_close_matches(name, known, 1, cutoff=0.6)
    suggested = _MEANT.get(name.lower()) or (close[0] if close else None)
    every = f"the commands are {', '.join(known)}"
    if suggested is None:
        return AutopipeError(f"there is no command {name!r}", hint=every)
    return AutopipeError(f"there is no command {name!r}", hint=f"{EXAMPLES[suggested]}; {every}")


app = typer.Typer(
    cls=_Table,
    no_args_is_help=True,
    rich_markup_mode=None,  # rich takes half of the time that --help may take
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)


def command(example: str, *, more: str | None = None) -> Callable[[Command], Command]:
    """Make a function a command; `--help` prints its docstring.

    Its parameters are the command's arguments and options; one whose type is a dataclass stands
    for an option a field (`option_groups`).

    Args:
        example: a command line that works.
        more: text that `--help` prints below the options.
    """

    def of(function: Command) -> Command:
        name, plain = function.__name__, spread(function)
        EXAMPLES[name], FUNCTIONS[name] = example, plain
        app.command(epilog=more)(with_talk(plain))
        return function

    return of


def with_talk(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options `--debug` and `--quiet` to a command's function."""

    @functools.wraps(function)
    def wrapper(*args: Any, debug: bool = False, quiet: bool = False, **kwargs: Any) -> None:
        console.ask(debug=debug, quiet=quiet)
        paths.begin()
        with ExitStack() as block:
            if not console.debug():
                block.enter_context(command_hushed())
            if not console.quiet():
                block.enter_context(bars.showing())
            if kwargs.get("json"):
                block.enter_context(console.data_alone())
            try:
                function(*args, **kwargs)
            except KeyboardInterrupt as error:
                from autopipe.runtime.launch import watchdog

                watchdog.verdict(error)  # the other ranks learn who has ended
                raise typer.Exit(130) from None

    hints = typing.get_type_hints(function, include_extras=True)
    own = inspect.signature(function).parameters
    own_ones = [parameter.replace(annotation=hints[name]) for name, parameter in own.items()]
    common = [
        inspect.Parameter("quiet", KEYWORD_ONLY, default=False, annotation=_Quiet),
        inspect.Parameter("debug", KEYWORD_ONLY, default=False, annotation=_Debug),
    ]
    return with_parameters(wrapper, [*own_ones, *common])
