"""Options as the fields of dataclasses: what the parser sees, and what the command gets."""

import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from autopipe.terminal.option_groups import given, spread


@dataclass(frozen=True)
class Pace:
    laps: Annotated[int | None, typer.Option(min=1)] = None
    fast: bool = False


def test_a_group_becomes_a_parameter_for_each_field() -> None:
    got: list[Any] = []

    def run(track: str, *, pace: Pace, quiet: bool = False) -> None:
        got.append((track, pace, quiet))

    plain = spread(run)
    seen = inspect.signature(plain).parameters
    assert {name: each.default for name, each in seen.items()} == {
        "track": inspect.Parameter.empty,
        "laps": None,
        "fast": False,
        "quiet": False,
    }
    assert seen["laps"].annotation.__metadata__[0].min == 1
    assert plain.__name__ == "run"
    plain(track="oval", laps=3, fast=True, quiet=False)
    assert got == [("oval", Pace(3, fast=True), False)]


def test_an_option_that_was_not_given_is_none() -> None:
    assert given(Pace()) == {"fast": False}
    assert given(Pace(2)) == {"laps": 2, "fast": False}
