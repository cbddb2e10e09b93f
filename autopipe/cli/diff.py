"""The command `autopipe diff`: two plan files -> what they train, and how they differ."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopipe.terminal import console
from autopipe.terminal.commands import Json, PlanArgument, command
from autopipe.terminal.paths import say_edits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autopipe.interop.compare import Difference, Entry
    from autopipe.planfile.contents import Plan


@command("autopipe diff plan.json other.json")
def diff(
    plan: PlanArgument,
    other: Annotated[Path, typer.Argument(help="the plan file to compare it with")],
    json: Json = False,
) -> None:
    """Say whether two plans train the same thing, and what differs in how.

    Ends as `diff` does: with 0 for equal plans, 1 for plans that differ, 2 for trouble. --json
    gives `same_training`, and of `what` and `how` the entries that differ, with both values.
    """
    from autopipe.interop.compare import compare
    from autopipe.planfile.contents import Plan
    from autopipe.report import paper

    first, second = Plan.load(plan), Plan.load(other)
    for loaded in (first, second):
        say_edits(loaded)
    found = compare(first, second)
    if json:
        console.show({"same_training": found.same_training, **_data(found)})
    elif found.none:
        print(f"{plan} and {other} are the same plan{_apart(first, second)}")
    else:
        for line in _lines(found, plan, other, paper.width()):
            print(line)
    if not found.none:
        raise typer.Exit(1)


def _apart(first: Plan, second: Plan) -> str:
    """The parts in which two files differ of plans that do the same: `, but for source`."""
    but = [name for name, value in vars(first).items() if value != getattr(second, name)]
    return f", but for {', '.join(but)}" if but else ""


def _data(difference: Difference) -> dict[str, list[dict[str, object]]]:
    def of(entry: Entry) -> dict[str, object]:
        return {key: value for key, value in asdict(entry).items() if key not in _FOR_PEOPLE}

    return {
        "what": [of(entry) for entry in difference.what],
        "how": [of(entry) for entry in difference.how],
    }


_FOR_PEOPLE = ("label", "shown")


def _lines(found: Difference, first: Path, second: Path, columns: int) -> Iterator[str]:
    names = (f"in {first}", f"in {second}")
    if found.same_training:
        yield "They train the same thing; gradients may differ by the order of sums."
    else:
        yield "They train different things:"
        yield from _table(found.what, names, columns)
    if found.how:
        yield ""
        yield f"How, {' and '.join(names)}:"
        yield from _table(found.how, names, columns)


LONGEST = 3
"""Lines of a text that is too long for a column."""


def _table(entries: tuple[Entry, ...], names: tuple[str, str], columns: int) -> Iterator[str]:
    """A line for each entry; where a text is too long for its column, lines for each plan."""
    from autopipe.report import paper

    width = max(len(entry.label) for entry in entries)
    room = max(12, (columns - width - 6) // 2)
    for entry in entries:
        first, second = entry.shown
        if max(len(first), len(second)) <= room:
            yield f"  {entry.label:<{width}}  {first:<{room}}  {second}".rstrip()
            continue
        yield f"  {entry.label}"
        for name, text in zip(names, entry.shown, strict=True):
            yield paper.paragraph(f"    {name}: {text}", columns, " " * 6, lines=LONGEST)
