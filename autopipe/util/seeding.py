"""Seeds of independent streams of random numbers, of Python's and numpy's, and of hashes."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HASHES = "PYTHONHASHSEED"
"""The variable that decides in which order a process goes through a set of texts.

Models of transformers make parts of themselves in such an order, `for kind in
set(config.layer_types)`. Processes that Python gives seeds at random would have other graphs.
"""


def seed(*parts: object) -> int:
    """A seed of 63 bits that depends on all parts and their order."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def begin_beside_torch(number: int) -> None:
    """Let Python's generator, and numpy's where it is loaded, begin at a seed."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)


def places() -> tuple[Any, Any]:
    """The states of Python's generator, and of numpy's where it is loaded."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy is not None else None


@contextmanager
def beside_torch(number: int) -> Iterator[None]:
    """Within, both generators begin at a seed; afterwards their states are restored."""
    with at(places()):
        begin_beside_torch(number)
        yield


@contextmanager
def at(given: tuple[Any, Any]) -> Iterator[None]:
    """Within, these generators go on from states of `places`; afterwards theirs are restored."""
    before = places()
    go_to(given)
    try:
        yield
    finally:
        go_to(before)


def go_to(given: tuple[Any, Any]) -> None:
    """Let these generators go on from states that `places` returned."""
    random.setstate(given[0])
    if given[1] is not None:
        sys.modules["numpy"].random.set_state(given[1])


def alike(function: Any, drawn: tuple[Any, Any]) -> Any:
    """A function that draws the same from these generators in each call, in each process.

    Args:
        drawn: the generators' states at each call.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with at(drawn):
            return function(*args, **kwargs)

    call.__module__ = function.__module__
    return call


def hashes_at_random() -> bool:
    """Whether this process iterates over sets of strings in an order of its own."""
    return os.environ.get(HASHES, "") in ("", "random")


def of_draws(line: str) -> str:
    """The end of a hint about a line that differs: how to seed a constant; "" for other lines."""
    name, _, rest = line.removeprefix("[").partition("] ")
    if not rest.startswith("constant "):
        return ""
    return f"; if {name} is drawn at random, call torch.manual_seed(0) before in each process"


def of_hashes() -> str:
    """The end of a hint about graphs that differ: how to fix hashes; "" where they are fixed."""
    if not hashes_at_random():
        return ""
    return f"; if the model goes through a set of texts, start each process with {HASHES}=0"
