"""The three shortcuts that make planning fast and change no plan, and a switch for each.

    user CPU seconds of `autopipe plan`, 32 layers of llama-7b on 4x8xA100-80GB, batch 256
    (2-core VM, 2026-11)                                          all on    this one off    gain

    "same modules"     repeated modules are traced once              29.4            40.5   27 %
    "repeated costs"   repeated layers are costed once               29.4            40.0   27 %
    "repeated stages"  repeated layers are dry-run once              29.4            43.8   33 %

A shortcut that gains less than a tenth is not worth its code. The plans with and without are equal:
`tests/whole/test_shortcuts.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

NAMES = "same modules", "repeated costs", "repeated stages"

_off: ContextVar[frozenset[str]] = ContextVar("shortcuts that are off", default=frozenset())


def on(name: str) -> bool:
    """Whether the shortcut `name`, one of `NAMES`, is enabled."""
    assert name in NAMES, name
    return name not in _off.get()


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Within, these shortcuts are disabled."""
    before = _off.set(_off.get() | frozenset(names))
    try:
        yield
    finally:
        _off.reset(before)
