"""Where in the user's own code something happened: `model.py:31`, not a line inside torch."""

from __future__ import annotations

import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

_OURS = str(Path(__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def _is_users(filename: str) -> bool:
    """Neither torch, nor autopipe, nor the standard library's plumbing between them."""
    if filename.startswith("<") or (filename.startswith(_PYTHON) and "-packages" not in filename):
        return False
    return not filename.startswith((_TORCH, _OURS))


def is_own_code(filename: str) -> bool:
    """Whether a file is the user's own: no library that is installed."""
    return _is_users(filename) and "-packages" not in filename


def _innermost(frames: Iterable[tuple[str, int | None]]) -> str:
    """`file:line` of the last frame that is the user's; an empty string if none is."""
    place = ""
    for filename, line in frames:
        if _is_users(filename):
            place = f"{filename}:{line}"
    return place


def here() -> str:
    """The user's line that is running now."""
    return _innermost((f.filename, f.lineno) for f in traceback.extract_stack())


def begins(function: object) -> str:
    """The line that a function of the user's begins at; an empty string for what has no code."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def of_error(error: BaseException) -> str:
    """The user's line that an exception passed through, its source text appended."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last.filename}:{last.lineno}" + (f" `{last.line}`" if last.line else "")


def of_trace(stack_trace: str | None) -> str:
    """The user's line in a stack trace that torch.export left on a node."""
    found = _FRAME.finditer(stack_trace or "")
    return _innermost((m["file"], int(m["line"])) for m in found)
