"""All models that there are to try, by name."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.zoo.hub import families, pictures
from benchmarks.zoo.odd import common
from benchmarks.zoo.subject import Subject


def subjects() -> Iterator[Subject]:
    """Those of the libraries that are installed, then those written by hand."""
    yield from families.subjects()
    yield from pictures.subjects()
    yield from common.subjects()


def named(pattern: str) -> list[Subject]:
    """The subjects in whose names the pattern occurs; a comma is an or."""
    words = pattern.split(",")
    return [subject for subject in subjects() if any(word in subject.name for word in words)]
