"""A switch: whether dry runs on a CPU's fake tensors stand for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_for_gpus: ContextVar[bool] = ContextVar("for_gpus", default=False)


@contextmanager
def for_gpus(wanted: bool) -> Iterator[None]:
    """Within, if `wanted`, dry runs have the kernels and the autocast of GPUs."""
    token = _for_gpus.set(wanted)
    try:
        yield
    finally:
        _for_gpus.reset(token)


def of_gpus() -> bool:
    """Whether the dry run around this call stands for a GPU."""
    return _for_gpus.get()
