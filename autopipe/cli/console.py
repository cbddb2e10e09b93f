"""How a command speaks: stdout is data, stderr is talk, and the user says how much of it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any


@dataclass
class _Manner:
    """What the command line has asked for: `--debug`, `--quiet`."""

    debug: bool = False
    quiet: bool = False


_manner = _Manner()


def forget() -> None:
    """A command line begins: nothing is asked for yet."""
    _manner.debug = _manner.quiet = False


def ask(*, debug: bool, quiet: bool) -> None:
    """What stands before a command and what stands behind it hold both."""
    _manner.debug |= debug
    _manner.quiet |= quiet


def debug() -> bool:
    """Whether to show where in the code something arose."""
    return _manner.debug


def quiet() -> bool:
    """Whether to keep to errors and data."""
    return _manner.quiet


def say(line: str) -> None:
    """A line of talk, unless `--quiet`."""
    if not _manner.quiet:
        tell(line)


def tell(line: str) -> None:
    """A line of an error, or of what is not as it was asked for: always."""
    print(line, file=sys.stderr, flush=True)


def show(data: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps(data, indent=2, allow_nan=False))
