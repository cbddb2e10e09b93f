"""Random numbers that do not depend on how the model is split.

Every random node draws from a seed of its own, made of (run, step, global micro-batch, node name):
dropout is bitwise the same for every number of stages, schedule, recomputation and resume.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_current = threading.local()
# The generators below are the process's own; threads (tests run one per stage) take turns.
_generators = threading.Lock()


def seed(*parts: object) -> int:
    """63 bits that depend on all parts and their order."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def stream(run: int, step: int, microbatch: int) -> Iterator[None]:
    """Random nodes that run inside draw for this run, step and global micro-batch."""
    _current.key = (run, step, microbatch)
    try:
        yield
    finally:
        del _current.key


def draw(op: Callable[..., Any], node: str, *args: Any, **kwargs: Any) -> Any:
    """Call a random op with the generators seeded for `node`; their state is left as it was.

    Outside a stream (fake tensors, which draw nothing) the op is called as it is.
    """
    key = getattr(_current, "key", None)
    if key is None:
        return op(*args, **kwargs)
    with _generators, torch.random.fork_rng(device_type="cuda"):
        torch.manual_seed(seed(*key, node))
        return op(*args, **kwargs)
