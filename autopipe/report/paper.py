"""Lay out text for a terminal: terms with their texts, tables, paragraphs.

    split     2 pipeline stages (pp) x 2 replicas    stage  forward  backward
              (dp) x 1 tensor part (tp)              -----  -------  --------
    memory    105.2 MiB of 1.0 GiB                   0      24.1 ms   48.2 ms

All of it is cut to a number of columns: texts go on in the next line, tables in a further table.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

WIDTH = 100
"""Columns of a page; longer lines are hard to read, however wide the terminal is."""

NARROWEST = 60
"""Columns that a page has at least."""


def width(most: int = WIDTH) -> int:
    """Columns to print in: a terminal's own, but from `NARROWEST` to `most`; elsewhere `most`."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return min(max(shutil.get_terminal_size((most, 24)).columns, NARROWEST), most)
    return most


@dataclass(frozen=True)
class Table:
    """A table of texts: names on the left, figures on the right.

    Attributes:
        names: of its columns; the first is that of the rows.
        rows: as many texts each as there are columns.
        splits: the first column of the second part, where the page is too narrow for all.
        left: the columns, besides the first, that hold words and not figures.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    splits: int | None = None
    left: tuple[str, ...] = ()

    def columns(self, kept: Sequence[int]) -> Table:
        """The first column and some of the others."""
        chosen = [0, *(index for index in kept if index)]
        return Table(
            tuple(self.names[index] for index in chosen),
            tuple(tuple(row[index] for index in chosen) for row in self.rows),
            left=self.left,
        )


def paragraph(text: str, columns: int, indent: str = "", *, lines: int | None = None) -> str:
    """Wrap a text to lines of at most `columns` columns; words that are too long are cut.

    Args:
        indent: of all lines but the first.
        lines: the largest number of lines; three dots stand for the rest. None: no limit.
    """
    return textwrap.fill(
        text,
        columns,
        subsequent_indent=indent,
        break_on_hyphens=False,
        max_lines=lines,
        placeholder=" ...",
    )


def terms(pairs: Iterable[tuple[str, str]], columns: int) -> str:
    """A term a line, and its text to the right of it."""
    found = list(pairs)
    margin = 2 + max((len(term) for term, _ in found), default=0)
    return "\n".join(
        paragraph(f"{term:<{margin}}{text}", columns, " " * margin) for term, text in found
    )


def fits(found: Table, columns: int) -> bool:
    """Whether a table fits in `columns` columns."""
    return _needs(found, range(len(found.names)), 1) <= columns


def table(found: Table, columns: int) -> str:
    """The table's lines; one that is too wide becomes several, each with the first column."""
    return "\n\n".join("\n".join(_lines(part, columns)) for part in _parts(found, columns))


def _parts(table: Table, columns: int) -> Iterator[Table]:
    every = range(len(table.names))
    if fits(table, columns):
        yield table
        return
    if table.splits is not None:
        for part in (every[: table.splits], every[table.splits :]):
            yield from _parts(table.columns(part), columns)
        return
    kept: list[int] = []
    for index in every[1:]:
        if kept and _needs(table, [0, *kept, index], 1) > columns:
            yield table.columns(kept)
            kept = []
        kept.append(index)
    yield table.columns(kept)


def _widths(found: Table) -> list[int]:
    return [max(map(len, column)) for column in zip(found.names, *found.rows, strict=True)]


def _needs(found: Table, columns: Iterable[int], gap: int) -> int:
    widths = [_widths(found)[index] for index in columns]
    return sum(widths) + gap * (len(widths) - 1)


def _lines(found: Table, columns: int) -> Iterator[str]:
    widths = _widths(found)
    gap = " " * (2 if _needs(found, range(len(widths)), 2) <= columns else 1)
    for row in (found.names, tuple("─" * size for size in widths), *found.rows):
        cells = [
            text.ljust(size) if not index or found.names[index] in found.left else text.rjust(size)
            for index, (text, size) in enumerate(zip(row, widths, strict=True))
        ]
        yield gap.join(cells).rstrip()


def legend(words: Mapping[str, str], columns: int) -> str:
    """`F forward; B backward; blank: nothing to do`, in lines."""
    entries = [f"{word}{':' if len(word) > 1 else ''} {text}" for word, text in words.items()]
    return paragraph("; ".join(entries), columns)
