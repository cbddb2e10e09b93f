"""Seeds of independent streams of random numbers, and of Python's hashes."""

from __future__ import annotations

import hashlib
import os

HASHES = "PYTHONHASHSEED"
"""The variable that decides in which order a process goes through a set of texts.

Models of transformers make parts of themselves in such an order, `for kind in
set(config.layer_types)`. Processes that Python gives seeds at random would have other graphs.
"""


def seed(*parts: object) -> int:
    """A seed of 63 bits that depends on all parts and their order."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def hashes_at_random() -> bool:
    """Whether this process goes through sets of texts in an order of its own."""
    return os.environ.get(HASHES, "") in ("", "random")


def of_draws(line: str) -> str:
    """What a hint says besides where a line of a graph is that of a constant, with its values."""
    name, _, rest = line.removeprefix("[").partition("] ")
    if not rest.startswith("constant "):
        return ""
    return f"; if {name} is drawn at random, call torch.manual_seed(0) before in each process"


def of_hashes() -> str:
    """What a hint says besides where a graph may be another one in each process."""
    if not hashes_at_random():
        return ""
    return f"; if the model goes through a set of texts, start each process with {HASHES}=0"
