"""A timeline as SVG: boxes to scale, words for a pointer that rests on them, a legend."""

from xml.etree import ElementTree

import pytest

from autopipe.report import colours
from autopipe.report.draw_svg import svg
from autopipe.schedules.generators import gpipe, one_f_one_b, zb_v
from autopipe.schedules.instructions import COMPUTE, parse_programs
from autopipe.schedules.simulate import Costs, LinkTime, simulate
from autopipe.schedules.transfers import Edge, insert


def full(compute, stages, link, **costs):
    """The timeline of a chain with transfers that take time."""
    edges = [Edge(stage, stage + 1, gradient=True) for stage in range(stages - 1)]
    programs = insert(compute, edges, [2] * (stages - 1))
    seconds = Costs.of([1.0] * stages, [2.0] * stages, links=lambda channel: link, **costs)
    return simulate(programs, seconds)


SPACE = "{http://www.w3.org/2000/svg}"


def parsed(timeline, **options):
    return ElementTree.fromstring(svg(timeline, **options))


def texts(tree):
    return [text.text for text in tree.iter(f"{SPACE}text")]


def test_every_instruction_is_a_box_with_its_times():
    timeline = full(one_f_one_b(2, 2), 2, LinkTime(1.0, 1.0, 1.0))
    tree = parsed(timeline)
    titles = [
        title.text for group in tree.iter(f"{SPACE}g") for title in group.iter(f"{SPACE}title")
    ]
    assert "rank 1, backward of micro-batch 0 in stage 1: 2 s, from 4 s to 6 s" in titles
    computes = [span for span in timeline.spans if span.instruction.kind in COMPUTE]
    assert len(titles) == len(computes) == 8


def test_the_boxes_are_to_scale():
    """Of 3 + 3 seconds on 1200 - 96 - 24 pixels."""
    tree = parsed(simulate(one_f_one_b(1, 2), Costs.even(1)))
    boxes = [group.find(f"{SPACE}rect") for group in tree.iter(f"{SPACE}g")]
    assert [(float(box.get("x")), float(box.get("width"))) for box in boxes] == [
        (96.0, 180.0),
        (276.0, 360.0),
        (636.0, 180.0),
        (816.0, 360.0),
    ]


def test_the_title_tells_the_predicted_step():
    timeline = simulate(one_f_one_b(2, 3), Costs.even(2, 1e-3, 2e-3))
    found = texts(parsed(timeline, title="1f1b <of two>"))
    assert found[:2] == ["1f1b <of two>", "predicted step 12 ms, bubble 25 %"]
    long, beside, *_ = texts(parsed(timeline, title=f"{'of two ' * 20}.json"))
    assert long == f"{'of two ' * 9}of two..." and beside == found[1]  # which it would cover
    assert {"rank 0", "rank 1", "forward", "backward"} <= set(found)
    assert [text for text in found if text and text.endswith("ms")] == [
        *("2 ms", "4 ms", "6 ms", "8 ms", "10 ms", "12 ms")
    ]


def test_the_legend_has_what_the_picture_has():
    plain = texts(parsed(simulate(gpipe(2, 2), Costs.even(2))))
    assert "backward for the weights" not in plain
    assert not [text for text in plain if text and "transfers" in text]
    tree = parsed(full(zb_v(2, 4), 4, LinkTime(0.1), reduce=[1.0] * 4))
    named = {"backward for the inputs", "backward for the weights", "sum of gradients"}
    assert named <= set(texts(tree))
    last = "lines between ranks: transfers"
    assert texts(tree)[2:9][-2:] == ["hatched: the second stage of a rank", last]
    places = [(float(text.get("x")), text.text) for text in tree.iter(f"{SPACE}text")]
    # Bug: what was too long for the one line, at some six pixels a letter, was cut off.
    assert all(left + 6.2 * len(words) <= 1200 for left, words in places[2:9])


@pytest.mark.parametrize("ranks", [1, 3])
def test_transfers_between_ranks_are_lines_and_those_within_one_are_not(ranks):
    """With transfers of no bytes and some latency, each is a line from a row to the next."""
    timeline = full(zb_v(ranks, 2), 2 * ranks, LinkTime(0.5))
    kinds = [path.get("class") for path in parsed(timeline).iter(f"{SPACE}path")]
    lines = [kind for kind in kinds if kind in ("ap-there", "ap-back")]
    assert len(lines) == 2 * 2 * 2 * (ranks - 1)


def test_a_step_of_nothing_is_a_picture_too():
    assert "predicted step 0 s" in svg(simulate(parse_programs("rank 0:"), Costs.of([], [])))


def test_what_a_rank_waits_for_is_told_in_words():
    """Rank 0 knows after 2 seconds that rank 1 receives; then F0 is under way for 2. No codes."""
    tree = parsed(full(one_f_one_b(2, 1), 2, LinkTime(2.0)))
    told = [title.text for title in tree.iter(f"{SPACE}title")]
    assert (
        "rank 1, waiting for the activations of micro-batch 0 from stage 0 (rank 0): "
        "4 s, from 0 s to 4 s"
    ) in told
    assert not [text for text in told if "_" in text or "<" in text]


def test_the_sums_are_told_in_words():
    tree = parsed(full(one_f_one_b(1, 1), 1, LinkTime(), reduce=[2.0]))
    told = [title.text for title in tree.iter(f"{SPACE}title")]
    assert "rank 0, summing the gradients of stage 0: 2 s, from 3 s to 5 s" in told


def test_a_schedule_by_itself_is_in_units():
    timeline = simulate(gpipe(1, 1), Costs.even(1))
    tree = parsed(timeline, planned=False)
    assert "predicted step 3 units, bubble 0.0 %" in texts(tree)
    told = [title.text for title in tree.iter(f"{SPACE}title")]
    assert "rank 0, forward of micro-batch 0 in stage 0: 1 units, from 0 to 1" in told


def test_a_page_that_says_the_rest_gets_the_rows_alone():
    timeline = simulate(gpipe(2, 2), Costs.even(2))
    assert "forward" not in texts(parsed(timeline, title=None))
    assert parsed(timeline, title=None).get("aria-label") == "one step of 2 ranks: 9 s, bubble 33 %"


def test_numbers_are_readable_on_their_boxes():
    tree = parsed(full(zb_v(2, 8), 4, LinkTime(0.1)))
    for group in tree.iter(f"{SPACE}g"):
        text = group.find(f"{SPACE}text")
        if text is not None:
            box = group.find(f"{SPACE}rect").get("fill")
            assert colours.contrast(text.get("fill"), box) >= 4.5
