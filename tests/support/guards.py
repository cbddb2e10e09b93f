"""Ranks under real guards, and what is left running of them."""

import contextlib
from pathlib import Path


def running(token: str) -> list[str]:
    """The command lines of all processes that have inherited `token`, the dead ones left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if token.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
    return found
