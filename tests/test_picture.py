"""Pictures of a timeline, as text and as SVG."""

import textwrap
from xml.etree import ElementTree

import pytest

from autopipe.picture import draw, svg
from autopipe.schedule import parse_programs
from autopipe.schedules import forward_only, gpipe, interleaved, one_f_one_b, zb_v
from autopipe.simulate import COMPUTE, Costs, Link, simulate
from autopipe.transfers import Edge, insert


def picture(text):
    return textwrap.dedent(text).strip("\n")


def drawn(compute, stages, **options):
    return draw(simulate(compute, Costs.even(stages)), **options)


def full(compute, stages, link, **costs):
    """The timeline of a chain with transfers that take time."""
    edges = [Edge(stage, stage + 1, gradient=True) for stage in range(stages - 1)]
    programs = insert(compute, edges, [2] * (stages - 1))
    seconds = Costs.of([1.0] * stages, [2.0] * stages, links=lambda channel: link, **costs)
    return simulate(programs, seconds)


def test_a_row_is_a_rank():
    assert drawn(one_f_one_b(4, 2), 4) == picture("""
        rank 0: F0 F1                         B0---    B1---
        rank 1:    F0 F1                B0---    B1---
        rank 2:       F0 F1       B0---    B1---
        rank 3:          F0 B0--- F1 B1---
    """)


def test_an_evaluation():
    assert drawn(forward_only([0, 1], 3), 2) == picture("""
        rank 0: F0 F1 F2
        rank 1:    F0 F1 F2
    """)


def test_a_backward_in_two_halves():
    programs = parse_programs("""
        rank 0: 0F0 0F1 0I0 0W0 0I1 0W1
        rank 1: 1F0 1I0 1F1 1I1 1W0 1W1
    """)
    assert drawn(programs, 2) == picture("""
        rank 0: F0 F1    I0 W0 I1 W1
        rank 1:    F0 I0 F1 I1 W0 W1
    """)


def test_the_second_stage_of_a_rank_is_in_lower_case():
    assert drawn(zb_v(2, 2), 4) == picture("""
        rank 0: F0 F1    f0 i0 w0 f1 i1 w1 I0 W0    I1 W1
        rank 1:    F0 f0 F1 f1 i0 w0 I0 W0 i1 w1 I1 W1
    """)


def test_of_more_stages_each_is_named():
    assert drawn(interleaved(1, 1, 3), 3) == "rank 0: 0F0 1F0 2F0 2B0---- 1B0---- 0B0----"


def test_the_unit_is_in_seconds():
    whole, half = simulate(gpipe(2, 2), Costs.even(2)), Costs.even(2, 0.5, 1.0)
    assert draw(simulate(gpipe(2, 2), half), 0.5) == draw(whole)
    assert draw(simulate(gpipe(1, 1), Costs.even(1, 2.0, 4.0))) == "rank 0: F0--- B0---------"


def test_waits_and_transfers():
    """A tensor takes 1 on the wire and 1 more to arrive: F1 leaves when F0 is on its way.

    Rank 0 waits for B0, for B1, and at the end for 2 until its gradients are summed.
    """
    timeline = full(one_f_one_b(2, 2), 2, Link(1.0, 1.0, 1.0), reduce=[2.0, 0.0])
    assert draw(timeline) == picture("""
        rank 0: F0 F1                   B0---    B1---
        rank 1:          F0 B0--- F1 B1---
    """)
    assert draw(timeline, waits=True, transfers=True) == picture("""
        rank 0:  F0 F1 ................. B0--- .. B1--- .....
        rank 1:  ........ F0 B0--- F1 B1--- ..
        0 to 1:     F0---
        0 to 1':       F1---
        1 to 0:                    B0---    B1---
    """)


def test_nothing_at_all():
    assert draw(simulate((), Costs.of([], []))) == ""
    assert draw(simulate(parse_programs("rank 0:"), Costs.of([], []))) == "rank 0:"


# SVG.

SPACE = "{http://www.w3.org/2000/svg}"


def parsed(timeline, **options):
    return ElementTree.fromstring(svg(timeline, **options))


def texts(tree):
    return [text.text for text in tree.iter(f"{SPACE}text")]


def test_every_instruction_is_a_box_with_its_times():
    timeline = full(one_f_one_b(2, 2), 2, Link(1.0, 1.0, 1.0))
    tree = parsed(timeline)
    titles = [
        title.text for group in tree.iter(f"{SPACE}g") for title in group.iter(f"{SPACE}title")
    ]
    assert "1B0: 4 s to 6 s" in titles
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
    assert found[:2] == ["1f1b <of two>", "predicted step 12 ms, bubble 25.0%"]
    assert {"rank 0", "rank 1", "forward", "backward", "bubble"} <= set(found)
    assert [text for text in found if text.endswith("ms")] == [
        *("2 ms", "4 ms", "6 ms", "8 ms", "10 ms", "12 ms")
    ]


def test_the_legend_has_what_the_picture_has():
    plain = texts(parsed(simulate(gpipe(2, 2), Costs.even(2))))
    assert "transfer" not in plain and "backward, weights" not in plain
    busy = texts(parsed(full(zb_v(2, 4), 4, Link(0.1), reduce=[1.0] * 4)))
    named = {"backward, inputs", "backward, weights", "second stage of a rank", "transfer"}
    assert named | {"sum of gradients"} <= set(busy) and "third stage of a rank" not in busy


@pytest.mark.parametrize("ranks", [1, 3])
def test_transfers_between_ranks_are_lines_and_those_within_one_are_not(ranks):
    """With transfers of no bytes and some latency, each is a line from a row to the next."""
    timeline = full(zb_v(ranks, 2), 2 * ranks, Link(0.5))
    lines = [path for path in parsed(timeline).iter(f"{SPACE}path") if path.get("opacity") == ".75"]
    assert len(lines) == 2 * 2 * 2 * (ranks - 1)


def test_a_step_of_nothing_is_a_picture_too():
    assert "predicted step 0" in svg(simulate(parse_programs("rank 0:"), Costs.of([], [])))
