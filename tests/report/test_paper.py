"""How terms, tables and paragraphs are laid out in a number of columns."""

import pytest

from autopipe.report import paper
from autopipe.report.paper import Table

TABLE = Table(
    ("stage", "device", "forward", "backward", "peak"),
    (("0", "A100", "1 ms", "2 ms", "18.5"), ("1-30", "T4", "12 ms", "24 ms", "7.0")),
    splits=4,
    left=("device",),
)


def test_words_stand_on_the_left_and_figures_on_the_right() -> None:
    assert paper.table(TABLE, 80) == (
        "stage  device  forward  backward  peak\n"
        "─────  ──────  ───────  ────────  ────\n"
        "0      A100       1 ms      2 ms  18.5\n"
        "1-30   T4        12 ms     24 ms   7.0"
    )


def test_columns_move_together_before_they_part() -> None:
    assert paper.fits(TABLE, 34) and not paper.fits(TABLE, 33)
    assert paper.table(TABLE, 34).splitlines()[0] == "stage device forward backward peak"
    assert paper.table(TABLE, 33).splitlines()[::5] == [
        "stage  device  forward  backward",
        "stage  peak",
    ]


def test_where_a_part_is_too_wide_as_well_columns_part_wherever_they_must() -> None:
    heads = [line for line in paper.table(TABLE, 15).splitlines() if line.startswith("stage")]
    assert heads == ["stage  device", "stage  forward", "stage  backward", "stage  peak"]


def test_terms() -> None:
    assert paper.terms([("split", "2 stages x 2"), ("why", "stage 1 is slow")], 16) == (
        "split  2 stages\n"
        "       x 2\n"
        "why    stage 1\n"
        "       is slow"
    )  # fmt: skip


@pytest.mark.parametrize(("columns", "width"), [("40", 60), ("80", 80), ("180", 100)])
def test_a_page_is_as_wide_as_the_terminal_but_within_reason(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert paper.width() == width


def test_what_is_no_terminal_is_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert (paper.width(), paper.width(110)) == (100, 110)
