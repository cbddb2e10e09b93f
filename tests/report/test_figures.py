"""The table of a plan's stages."""

from dataclasses import replace

import pytest

from autopipe.planfile import predict
from autopipe.planfile.parts import Memory
from autopipe.report.figures import figures, legend
from autopipe.util.numbers import percent
from tests.support.plans import chain, example_plan


def test_equal_stages_that_follow_each_other_share_a_row() -> None:
    plan = chain(5, 4, lambda stage: 3e-3 if stage == 2 else 1e-3)
    assert [row[:3] for row in figures(plan).table.rows] == [
        ("0-1", "1 ms", "2 ms"),
        ("2", "3 ms", "6 ms"),
        ("3-4", "1 ms", "2 ms"),
    ]


def test_the_bubble_of_a_stage_is_that_of_its_rank() -> None:
    """F 1 and B 2 ms in stage 0, three times as much in stage 1; of 21 ms they compute 6 and 18.

            0     1     2     4          10          12       13         19          21
    rank 0  |  F0 |  F1 |                |     B0    |                   |     B1    |
    rank 1        |    F0     |    B0    |     F1             |    B1    |
    """
    plan = chain(2, 2, lambda stage: 3e-3 if stage else 1e-3)
    assert [row[3] for row in figures(plan).table.rows] == [percent(15 / 21), percent(3 / 21)]
    assert predict.timeline(plan).bubbles == pytest.approx([15 / 21, 3 / 21])


def test_which_rank_has_a_stage_is_said_where_that_is_not_its_number() -> None:
    found = figures(chain(2, 4, lambda stage: 1e-3 * (1 + stage), schedule="zb-v", chunks=2))
    assert found.table.names[:3] == ("stage", "rank", "forward")
    assert [row[:2] for row in found.table.rows] == [("0", "0"), ("1", "1"), ("2", "1"), ("3", "0")]


def test_printed_bytes_add_up_to_the_peak() -> None:
    """Bug: 0.3, 0.3, 0.5, 1.8 and 1.1 MiB stood below a peak of 3.9, each rounded by itself."""
    tenth = 2**20 / 10
    held = Memory(
        *(round(tenth * part) for part in (2.7, 2.7, 5.4, 0.0, 17.6, 10.0, 0.6)), copies=0
    )
    plan = chain(2, 4)
    stages = [replace(s, predicted=replace(s.predicted, memory=held)) for s in plan.stages]
    found = figures(replace(plan, stages=tuple(stages)))
    (row,) = (row[found.parts - 1 :] for row in found.table.rows)
    assert found.table.names[found.parts - 1] == "peak" and row[0] == "3.9"
    assert sum(float(part) for part in row[1:]) == pytest.approx(3.9)


def test_the_legend() -> None:
    plan = example_plan()
    assert list(legend(plan, "MiB")) == ["forward, backward", "bubble", "peak, in MiB"]
    assert legend(plan, "MiB", parts=False)["peak, in MiB"] == (
        "a device's fullest moment; --stages shows what it is made up of"
    )
    assert "rank" in legend(chain(2, 4, schedule="zb-v", chunks=2), "GiB")
