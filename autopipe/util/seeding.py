"""Derive seeds for independent streams of random numbers."""

from __future__ import annotations

import hashlib


def seed(*parts: object) -> int:
    """A seed of 63 bits that depends on all parts and their order."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
