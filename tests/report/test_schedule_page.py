"""Schedules on paper: by name, from a file, of a plan; with a headline, on a page of text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopipe.errors import ScheduleError
from autopipe.planfile.contents import Plan
from autopipe.report import schedule_page
from autopipe.report.schedule_page import WIDTH, Shape
from autopipe.schedules.instructions import format_programs
from autopipe.schedules.registry import SCHEDULES, make
from tests.support.plans import chain


def test_a_schedule_by_its_name() -> None:
    """F + B = 3 on each of two ranks: four micro-batches, and one rank's to fill and drain."""
    timeline = schedule_page.of_schedule("1f1b", Shape(ranks=2, micro_batches=4))
    assert schedule_page.describe("1f1b", timeline, waits=False, transfers=False) == (
        "1f1b: 2 ranks, 4 micro-batches; a step takes 15 units, 20 % of it bubble\n"
        "micro-batches held by each rank: 2, 1\n"
        "rank 0: F0 F1       B0--- F2 B1--- F3 B2---    B3---\n"
        "rank 1:    F0 B0--- F1 B1--- F2 B2--- F3 B3---"
    )


def test_waits_and_transfers_are_drawn_on_demand() -> None:
    """Notice of the receive comes with the end of F0; then each way takes 1."""
    timeline = schedule_page.of_schedule("1f1b", Shape(ranks=2, micro_batches=1, latency=1.0))
    assert schedule_page.describe("1f1b", timeline, waits=True, transfers=True).splitlines()[
        2:
    ] == [
        "rank 0: F0 .............. B0---",
        "rank 1: ..... F0 B0---",
        "0 to 1:    F0",
        "1 to 0:                B0",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_ranks_micro_batch_takes_the_same_however_many_stages_it_is_cut_into(name: str) -> None:
    """In three chunks each has a third of it, and what a rank computes in all is 4 (1 + 2)."""
    timeline = schedule_page.of_schedule(name, Shape(ranks=2, micro_batches=4, chunks=3))
    assert timeline.busy == pytest.approx((12, 12))


def test_what_a_rank_of_several_stages_holds_is_told_by_stage() -> None:
    timeline = schedule_page.of_schedule("zb-v", Shape(ranks=2, micro_batches=4))
    head = schedule_page.describe("zb-v", timeline, waits=False, transfers=False).splitlines()[1]
    assert head.endswith("held by each rank: 4 + 1, 3 + 2")


def test_depths_are_those_of_eager_1f1b_alone() -> None:
    deep = Shape(ranks=2, micro_batches=6, depth=3)
    held = [
        schedule_page.describe(
            name, schedule_page.of_schedule(name, deep), waits=False, transfers=False
        )
        for name in ("1f1b", "eager-1f1b")
    ]
    assert "each rank: 2, 1\n" in held[0] and "each rank: 5, 1\n" in held[1]


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    text = f"# GPipe\n{format_programs(make('gpipe', 2, 3))}\n"
    path.write_text(text, encoding="utf-8-sig")  # as some editors save it
    programs = schedule_page.from_file(path)
    assert programs == make("gpipe", 2, 3)
    of_file = schedule_page.of_schedule(str(path), Shape(ranks=9))  # the file says how many
    assert of_file == schedule_page.of_schedule("gpipe", Shape(ranks=2, micro_batches=3))


def test_no_schedule_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError) as refused:
        schedule_page.of_schedule("zigzag", Shape())
    assert refused.value.message == "there is no schedule 'zigzag', and no file of that name"
    assert (refused.value.hint or "").startswith("one of naive, gpipe, 1f1b, eager-1f1b, ")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ScheduleError, match="no file that can be read: "):
        schedule_page.from_file(tmp_path / "picture.png")


def test_a_file_with_a_mistake_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("rank 0: 0F0 0B0\nrank 1: 1B0 1F0\n")
    with pytest.raises(ScheduleError) as refused:
        schedule_page.from_file(path)
    assert refused.value.message == (
        f"{path}: rank 1: 1B0 needs 1F0 before it, which stands after it"
    )


def test_a_file_whose_ranks_wait_for_each_other_for_good(tmp_path: Path) -> None:
    """Stage 0 wants the gradient of micro-batch 0 before it sends stage 1 what that wants first."""
    path = tmp_path / "mine.txt"
    path.write_text("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1F0 1B0 1B1\n")
    with pytest.raises(ScheduleError, match="wait"):
        schedule_page.of_schedule(str(path), Shape())


def test_the_timeline_of_a_plan_is_the_one_it_predicts() -> None:
    assert schedule_page.of_plan(chain(2, 4)).seconds == pytest.approx(15e-3, rel=1e-6)


def test_labels_are_cut_before_a_page_is_too_wide() -> None:
    """32 micro-batches of F + B = 3 need 3 columns for each second; a page has fewer."""
    timeline = schedule_page.of_schedule("1f1b", Shape(ranks=2, micro_batches=32))
    lines = schedule_page.drawing(timeline).splitlines()
    assert WIDTH < max(map(len, lines)) <= 2 * WIDTH
    wide = schedule_page.drawing(
        schedule_page.of_schedule("1f1b", Shape(ranks=2, micro_batches=10))
    )
    assert max(map(len, wide.splitlines())) <= WIDTH and "B9---" in wide


def test_a_drawing_that_fits_or_none() -> None:
    timeline = schedule_page.of_schedule("gpipe", Shape(ranks=1, micro_batches=2))
    assert schedule_page.shortest(timeline) == 1.0
    assert schedule_page.fitting(timeline, 1.0, 26) == "rank 0: F0 F1 B0--- B1---"
    assert schedule_page.fitting(timeline, 1.0, 24) is None
    assert schedule_page.fitting(timeline, 2.0, 24) == "rank 0: F F B0 B1"


def test_very_unlike_seconds_are_never_drawn_to_the_scale_of_the_shortest() -> None:
    """At a label a nanosecond the line would have nine thousand million columns."""
    timeline = schedule_page.of_schedule(
        "1f1b", Shape(ranks=1, micro_batches=1, forward=1e-9, backward=3)
    )
    assert schedule_page.fitting(timeline, schedule_page.shortest(timeline), WIDTH) is None
    assert max(map(len, schedule_page.drawing(timeline).splitlines())) <= WIDTH


def test_no_time_at_all_is_drawn_too() -> None:
    still = Shape(ranks=2, micro_batches=1, forward=0.0, backward=0.0)
    assert (
        schedule_page.drawing(schedule_page.of_schedule("1f1b", still))
        == "rank 0: F B\nrank 1: F B"
    )


def test_the_times_of_a_plan_are_in_seconds() -> None:
    plan = chain(2, 4)
    said = schedule_page.describe(
        "plan.json", schedule_page.of_plan(plan), planned=True, waits=False, transfers=False
    )
    assert said.startswith("plan.json: 2 ranks, 4 micro-batches; a step takes 15 ms, 20 % of it b")


def test_the_key_of_several_drawings_has_the_letters_of_all() -> None:
    found = [
        schedule_page.of_schedule(name, Shape(ranks=2, micro_batches=2))
        for name in ("1f1b", "zb-v")
    ]
    assert schedule_page.key(found, 60, planned=False, waits=False) == (
        "F forward; B backward; after them: the number of the\n"
        "micro-batch; blank: nothing to do (the bubble); I backward\n"
        "for the inputs; W backward for the weights; lower case: the\n"
        "second stage of a rank; a unit: that of --forward (1 without\n"
        "it), --backward (2), --latency (0) and --wire (0)"
    )
    assert "unit" not in schedule_page.key(found, planned=True, waits=False)


# --- the step of a plan, on a screen


def drawn(plan: Plan, columns: int = 100) -> schedule_page.Drawn:
    found = schedule_page.step(plan, columns)
    assert found is not None
    return found


def test_as_many_micro_batches_as_fit_are_drawn() -> None:
    """Of four ranks the seventh micro-batch ends in column 98, the eighth would in 107."""
    found = drawn(chain(4, 64))
    assert found.shown == 7
    assert found.picture.splitlines()[-1] == (
        "rank 3:          F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6---"
    )


def test_a_step_is_never_wider_than_the_page() -> None:
    unlike = chain(2, 4, lambda stage: 1e-6 if stage else 1e-2)
    for plan in (unlike, *(chain(pp, m) for pp, m in ((2, 64), (4, 4), (8, 64), (31, 64)))):
        for columns in (60, 80, 100):
            lines = drawn(plan, columns).picture.splitlines()
            assert max(map(len, lines)) <= columns and len(lines) <= 8


def test_of_a_long_pipeline_the_first_and_the_last_ranks_are_drawn() -> None:
    """12 micro-batches that all ranks compute for 3 ms: (12 + 11) * 3 = 69 ms, 0.75 a letter."""
    found = drawn(chain(12, 12))
    assert [line[:8] for line in found.picture.splitlines()] == [
        *("rank 0: ", "rank 1: ", "  ...", "rank 10:", "rank 11:"),
    ]
    assert found.legend == {
        "F": "forward",
        "B": "backward",
        "a letter": "what takes most of about 690 us",
        "blank": "nothing to do (the bubble)",
    }


def test_a_stage_that_takes_no_time_is_not_drawn() -> None:
    assert schedule_page.step(chain(2, 4, lambda stage: 0.0), 100) is None


def test_second_stages_of_ranks_are_in_lower_case() -> None:
    """Four stages on two ranks: micro-batch 0 goes forward in the first 4 ms, 0 1 0 1, then back.

    Stage 3 on rank 1 runs it backward from 4 to 6 ms, stage 2 on rank 0 from 6 to 8.
    """
    found = drawn(chain(2, 4, schedule="interleaved", chunks=2))
    assert found.picture == (
        "rank 0: F0 F1 f0 f1 F2    b0--- F3 b1--- f2 B0--- f3 B1---    b2---    b3--- B2--- B3---\n"
        "rank 1:    F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3---"
    )
    assert found.legend["lower case"] == "the second stage of a rank"


def test_backwards_in_halves() -> None:
    """I and W are half of B, 1 ms each: rank 0 has the gradient from rank 1's I0 at 3 ms."""
    assert drawn(chain(2, 2, schedule="zb-h1")).picture == (
        "rank 0: F0 F1    I0 W0 I1 W1\n"
        "rank 1:    F0 I0 F1 I1 W0 W1"
    )  # fmt: skip


def test_more_stages_of_a_rank_have_their_number_in_front() -> None:
    found = drawn(chain(1, 1, schedule="interleaved", chunks=3))
    assert found.picture == "rank 0: 0F0 1F0 2F0 2B0---- 1B0---- 0B0----"
    assert found.legend["before them"] == "the number of the stage"


def test_a_written_schedule_is_drawn_whole() -> None:
    """There is no shorter one: it is drawn with all its micro-batches, in letters if need be."""
    lines = ("rank 0: 0F1 0F0 0B0 0B1", "rank 1: 1F1 1F0 1B0 1B1")
    plan = replace(chain(2, 2), schedule="written", programs=lines)
    assert drawn(plan).picture.splitlines() == [
        "rank 0: F1 F0          B0--- B1---",
        "rank 1:    F1 F0 B0--- B1---",
    ]
    many = format_programs(make("gpipe", 2, 40)).splitlines()
    found = drawn(replace(chain(2, 40), schedule="written", programs=tuple(many)))
    assert (found.shown, found.legend["a letter"]) == (40, "what takes most of about 1.23 ms")
