"""What is written for another runtime, and the block in it that says what it leaves out."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from autopipe.util.version import VERSION


@dataclass(frozen=True)
class Exported:
    """A plan in another runtime's words.

    Attributes:
        text: of the file.
        unsupported: a sentence for each thing that the runtime has no words for.
    """

    text: str
    unsupported: tuple[str, ...]


def head(target: str, unsupported: tuple[str, ...], *use: str) -> str:
    """The first lines of a file, as comments: what wrote it, how to use it, what is missing."""
    lines = [f"Written by autopipe {VERSION} for {target}."]
    lines += use
    lines.append("cannot express:" + ("" if unsupported else " nothing of this plan is lost"))
    for sentence in unsupported:
        lines += textwrap.wrap(printable(sentence), 96, initial_indent="- ", subsequent_indent="  ")
    return "".join(f"# {line}\n" for line in lines)


def printable(text: str) -> str:
    """The text for a comment of one line: "?" for each letter that cannot be printed."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
