"""Turn the command-line parser's errors into autopipe's sentences.

--pp 0           --pp: expected a whole number of at least 1, found '0'
--frob           there is no option '--frob'
foo              ACTION: 'foo' is not one of 'info', 'verify', 'convert'
(no argument)    MODEL is missing: model.py, or package.module:factory
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from autopipe.errors import AutopipeError

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The parser's base class of usage errors; typer exports only this one of its subclasses."""

_KINDS = {int: "a whole number", float: "a number", Path: "a path", str: "a word"}


def check_words(name: str, argv: Sequence[str]) -> None:
    """Refuse an empty word, which would be the current folder where a path is expected.

    Args:
        name: the command's: `autopipe`.
        argv: the command line.

    Raises:
        AutopipeError: names the option that it stands behind.
    """
    for word, before in zip(argv, ["", *argv], strict=False):
        option, mark, value = word.partition("=")
        if word and not (word.startswith("--") and mark and not value):
            continue
        place = before if before.startswith("-") and not word else option
        what = f"{place}: expected a value, found ''" if place else "one of the arguments is ''"
        raise AutopipeError(
            what, hint=f"is a variable on the command line unset? `{name} --help` lists all options"
        )


def sentence(
    error: Any, name: str, argv: Sequence[str], function: Callable[..., None] | None, example: str
) -> AutopipeError:
    """The message for a usage error: what was expected, what was found, and an example.

    Args:
        error: a `UsageError`.
        name: the command's: `autopipe plan`.
        argv: the command line.
        function: of the command; its hints say what its options take.
        example: a line that is right.
    """
    context = getattr(error, "ctx", None)
    every = f"`{getattr(context, 'command_path', name)} --help` lists all options"
    parameter = getattr(error, "param", None)
    option = getattr(error, "option_name", None)
    if parameter is not None and type(error).__name__ == "MissingParameter":
        description = f": {parameter.help}" if getattr(parameter, "help", None) else ""
        return AutopipeError(f"{_shown(parameter)} is missing{description}", hint=example)
    if parameter is not None and parameter.param_type_name == "argument":
        return AutopipeError(f"{_shown(parameter)}: {_plain(error.message)}", hint=example)
    if parameter is not None:
        shown = _shown(parameter)
        value = _value_of_option(parameter.opts, argv)
        expected = _expected(function, parameter.name)
        if value is None or expected is None:
            return AutopipeError(f"{shown}: {_plain(error.message)}", hint=every)
        return AutopipeError(f"{shown}: expected {expected}, found {value!r}", hint=every)
    if option is not None and type(error).__name__ == "NoSuchOption":
        known = [] if context is None else [o for p in context.command.params for o in p.opts]
        close = difflib.get_close_matches(option, known, 1)
        suggestion = f"is it {close[0]}? " if close else ""
        return AutopipeError(f"there is no option {option!r}", hint=f"{suggestion}{every}")
    if option is not None and " requires " in error.message:
        return AutopipeError(f"{option} needs a value", hint=every)
    match = re.search(r"unexpected extra arguments?(?:\(s\))? \((?P<words>.*)\)", error.message)
    message = f"one argument too many: {match['words']}" if match else _plain(error.message)
    return AutopipeError(message, hint=f"{example}; {every}")


def _shown(parameter: Any) -> str:
    """`PLAN`, or `--to`."""
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    return str(max(parameter.opts, key=len))


def _plain(message: str) -> str:
    """In the middle of a sentence: `Got unexpected extra argument (x)` without its capital."""
    message = message.removeprefix("Value error, ")
    return (message[:1].lower() + message[1:]).rstrip(".")


def _value_of_option(names: Sequence[str], argv: Sequence[str]) -> str | None:
    """The word after the first of an option's names, or behind its `=`; None: it is not given."""
    for here, following in zip(argv, [*argv[1:], None], strict=True):
        if here in names:
            return following
        for name in names:
            if here.startswith(f"{name}="):
                return here.removeprefix(f"{name}=")
    return None


def _expected(function: Callable[..., None] | None, name: str) -> str | None:
    """`a whole number of at least 1`, as the function's own hint of that argument says."""
    hint = typing.get_type_hints(function, include_extras=True).get(name) if function else None
    if hint is None:
        return None
    kinds = [kind for kind in _KINDS if kind in _parts(hint)]
    if not kinds:
        return None
    infos = getattr(hint, "__metadata__", ())
    low = next((info.min for info in infos if getattr(info, "min", None) is not None), None)
    high = next((info.max for info in infos if getattr(info, "max", None) is not None), None)
    limits = f" of at least {low:g}" if low is not None else ""
    limits += f" and at most {high:g}" if high is not None else ""
    return _KINDS[kinds[0]] + limits


def _parts(hint: Any) -> set[Any]:
    """All types in a hint: `Annotated[int | None, ...]` has int."""
    inner = [arg for arg in typing.get_args(hint) if isinstance(arg, type) or typing.get_args(arg)]
    return {hint, *inner, *(part for arg in inner for part in _parts(arg))}
