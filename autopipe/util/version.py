"""The version of this autopipe, as its package has it; an exported text says it."""

from __future__ import annotations

from importlib import metadata

try:
    VERSION = metadata.version("autopipe")
except metadata.PackageNotFoundError:  # a checkout that was never installed
    VERSION = "(not installed as a package)"
