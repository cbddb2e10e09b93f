"""The version of this autopipe, as its package has it, and the torch that it was tried with."""

from __future__ import annotations

import sys
from importlib import metadata

try:
    VERSION = metadata.version("autopipe")
except metadata.PackageNotFoundError:  # a checkout that was never installed
    VERSION = "(not installed as a package)"

NEWEST_TORCH = (2, 15)
"""The newest that tests were run with; a newer one may trace models otherwise."""


def untried_torch() -> str | None:
    """A sentence if the torch that is loaded is newer than any that autopipe was tried with."""
    loaded = sys.modules.get("torch")
    if loaded is None:
        return None
    version = str(loaded.__version__)
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) <= NEWEST_TORCH:
        return None
    newest = ".".join(map(str, NEWEST_TORCH))
    return f"this is torch {version}; autopipe was tried with {newest} at the newest"
