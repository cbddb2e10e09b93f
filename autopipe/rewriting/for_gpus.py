"""Whether a rehearsal on fake tensors of a CPU is of what GPUs do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_for_gpus: ContextVar[bool] = ContextVar("for_gpus", default=False)


@contextmanager
def for_gpus(wanted: bool) -> Iterator[None]:
    """Within, rehearsals are of GPUs, if `wanted`: of their kernels, and of their autocast."""
    token = _for_gpus.set(wanted)
    try:
        yield
    finally:
        _for_gpus.reset(token)


def of_gpus() -> bool:
    """Whether the rehearsal around this call is of GPUs."""
    return _for_gpus.get()
