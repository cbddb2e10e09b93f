"""What torch and transformers say on their own account: kept back, unless it is of the user's file.

    warnings of Python        shown where the line that warns is the user's
    logs of the libraries     errors only
    torch's C++ notes         errors only (`NNPACK`, `Redirects are currently not supported ...`)

`--debug` shows all of it.
"""

from __future__ import annotations

import os
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_QUIET = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
"""Read by the libraries when they are imported; what the user has set stays."""


@contextmanager
def hushed() -> Iterator[None]:
    """In the block, and in the processes that are started in it."""
    added = {name: value for name, value in _QUIET.items() if name not in os.environ}
    shows = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if _is_users(filename):
            shows(message, category, filename, lineno, file, line)

    os.environ.update(added)
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shows
        for name in added:
            os.environ.pop(name, None)


def _is_users(filename: str) -> bool:
    """Neither autopipe's, nor Python's own, nor installed beside it."""
    ours = [Path(__file__).parents[1], *map(Path, sysconfig.get_paths().values())]
    path = Path(filename)
    return path.is_file() and not any(path.is_relative_to(folder) for folder in ours)
