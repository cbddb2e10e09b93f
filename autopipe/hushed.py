"""Silence for libraries while a model is built and traced; what the user's own code says is heard.

warnings.warn in a file of the user's     heard, once
warnings of torch, transformers, ...      not: they are about what autopipe does there
logs of transformers below an error       not
print                                     heard on stderr: stdout is for what a command gives
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from autopipe import places

_TALKERS = ("transformers",)


@contextmanager
def libraries_hushed(*, heard: bool) -> Iterator[None]:
    """Within, no library says anything; afterwards the warnings of the user's code are given.

    Args:
        heard: False where the code has run before, and has warned.
    """
    logs = [logging.getLogger(name) for name in _TALKERS]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(max(log.level, logging.ERROR))
    try:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(sys.stderr):
            warnings.simplefilter("default" if heard else "ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
        for warning in caught:
            if places.is_own_code(warning.filename):
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
