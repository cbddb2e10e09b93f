"""Print data to stdout and messages to stderr, as `--quiet` and `--debug` ask."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Any, TextIO

from autopipe.util import self_checks


@dataclass
class _Manner:
    """The options `--debug` and `--quiet` of the current command line, and the stream for data."""

    debug: bool = False
    quiet: bool = False
    data: TextIO | None = None


_manner = _Manner()


def forget() -> None:
    """Reset both options at the beginning of a command line."""
    _manner.debug = _manner.quiet = False


def replace_what_cannot_be_printed() -> None:
    """Print ? for characters that the terminal's encoding lacks: table lines in ISO-8859-1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="replace")


def ask(*, debug: bool, quiet: bool) -> None:
    """Set options; those given before the command and those after it add up."""
    _manner.debug |= debug
    if debug:
        self_checks.turn_on()
    _manner.quiet |= quiet


def debug() -> bool:
    """Whether to show tracebacks and other details (`--debug`)."""
    return _manner.debug


def quiet() -> bool:
    """Whether to print only errors and data (`--quiet`)."""
    return _manner.quiet


def say(line: str) -> None:
    """Print a line to stderr, unless `--quiet`."""
    if not _manner.quiet:
        tell(line)


def tell(line: str) -> None:
    """Print a line of an error or a warning to stderr, also with `--quiet`."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def data_alone() -> Iterator[None]:
    """Within, stdout gets what `show` prints alone: what a model file prints goes to stderr."""
    _manner.data = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _manner.data = None


def show(data: Any) -> None:
    """Print one JSON object to stdout."""
    show_text(json.dumps(data, indent=2, allow_nan=False) + "\n")


def show_text(text: str) -> None:
    """Print data that is text already to stdout."""
    print(text, end="", file=_manner.data or sys.stdout)
