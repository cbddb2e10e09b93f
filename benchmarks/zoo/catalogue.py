"""All models of the zoo, by name."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.zoo.hub import families, pictures
from benchmarks.zoo.odd import common
from benchmarks.zoo.subject import Subject


def subjects(every: bool = True) -> Iterator[Subject]:
    """Those of the libraries that are installed, then those written by hand.

    Args:
        every: all tasks of a family and all variants of a file, not one of each.
    """
    seen: set[str] = set()
    for subject in (*families.subjects(every), *pictures.subjects(every)):
        if every or subject.family not in seen:
            yield subject
        seen.add(subject.family)
    yield from common.subjects()


def named(pattern: str, every: bool = True) -> list[Subject]:
    """The subjects in whose names the pattern occurs; a comma is an or."""
    words = pattern.split(",")
    return [subject for subject in subjects(every) if any(word in subject.name for word in words)]
