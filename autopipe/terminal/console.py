"""Print data to stdout and messages to stderr, as `--quiet` and `--debug` ask."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Any, TextIO

from autopipe.errors import AutopipeError
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


def open_streams() -> None:
    """Print to nowhere what would go to a stream that was closed (`>&-`), which is None in Python,
    and ? for characters that the terminal's encoding lacks: table lines in ISO-8859-1."""
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="replace")


def flush_data(more: str = "") -> None:
    """Write what is printed to stdout now; if nobody reads it (`| head`), end without a word.

    Args:
        more: text to print first.

    Raises:
        AutopipeError: the system refuses, in its own words.
    """
    try:
        print(more, end="", flush=True)
    except OSError as error:
        with suppress(OSError, ValueError):  # what is left would be tried once more at the exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        raise AutopipeError(
            f"stdout cannot be written: {error.strerror}",
            hint="make room where the shell sends it, or send it elsewhere",
        ) from error


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
