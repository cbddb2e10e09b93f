"""Suppress warnings and logs of torch and transformers, and keep those of the user's code.

                           in a whole command           while a model is built or traced
    warnings of Python     those of the user's files    those of the user's files, once, at the end
    logs of transformers   errors only                  errors only
    torch's C++ notes      errors only
    print                                               on stderr: stdout is a command's result

torch's notes are about `NNPACK` or `Redirects are currently not supported`. `--debug` shows all
that a command suppresses. Neither library is imported here.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from autopipe.frontend import transformers_adapter, user_lines

_SETTINGS = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
    **transformers_adapter.SETTINGS,
}
"""Read by the libraries when they are imported; what the user has set stays."""


@contextmanager
def command_hushed() -> Iterator[None]:
    """Suppress within the block, and in processes started there; the block may import libraries."""
    added = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    shows = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if user_lines.is_own_code(filename):
            shows(message, category, filename, lineno, file, line)

    os.environ.update(added)
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shows
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def libraries_hushed(*, heard: bool) -> Iterator[None]:
    """Suppress within the block; after it give the user's warnings, under the caller's filters.

    In the block no filter makes a library's warning an error.

    Args:
        heard: False if the code has run before, and its warnings were shown.
    """
    log = logging.getLogger(transformers_adapter.LOGGER)
    level = log.level
    log.setLevel(max(level, logging.ERROR))
    try:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(sys.stderr):
            warnings.simplefilter("default" if heard else "ignore")
            yield
    finally:
        log.setLevel(level)
        for warning in caught:
            if user_lines.is_own_code(warning.filename):
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
