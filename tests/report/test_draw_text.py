"""A timeline as text."""

import textwrap

from autopipe.report.draw_text import draw, is_cut, legend, strip
from autopipe.schedules.generators import forward_only, gpipe, interleaved, one_f_one_b, zb_v
from autopipe.schedules.instructions import parse_programs
from autopipe.schedules.simulate import Costs, LinkTime, simulate
from autopipe.schedules.transfers import Edge, insert


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
    timeline = full(one_f_one_b(2, 2), 2, LinkTime(1.0, 1.0, 1.0), reduce=[2.0, 0.0])
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


def test_a_label_without_room_loses_its_number():
    """A forward takes 1 and a backward 2; a label's width for each 2 is too little."""
    timeline = full(gpipe(1, 1), 1, LinkTime(0.0))
    whole, cut = (draw(timeline, unit, waits=True) for unit in (1.0, 2.0))
    assert (whole, cut) == ("rank 0: F0 B0---", "rank 0: F B")
    assert not is_cut(whole, timeline) and is_cut(cut, timeline)


def test_the_legend_has_the_letters_of_the_picture():
    assert legend(simulate(one_f_one_b(2, 2), Costs.even(2))) == {
        "F": "forward",
        "B": "backward",
        "after them": "the number of the micro-batch",
        "blank": "nothing to do (the bubble)",
    }
    assert legend(simulate(gpipe(2, 2), Costs.even(2)), cut=True)["after them"] == (
        "the number of the micro-batch, where it fits"
    )
    halves = legend(simulate(zb_v(2, 2), Costs.even(4)), waits=True)
    assert halves["I"] == "backward for the inputs" and halves["W"] == "backward for the weights"
    assert halves["lower case"] == "the second stage of a rank"
    assert halves["dots"] == "waiting for a transfer or for sums"
    of_three = legend(simulate(interleaved(1, 1, 3), Costs.even(3)))
    assert of_three["before them"] == "the number of the stage"


def test_many_ranks_are_rows_of_letters():
    """Of the 18 seconds of six ranks, a letter is a second; what stands between is left out."""
    timeline = simulate(one_f_one_b(6, 1), Costs.even(6))
    assert strip(timeline, 8 + 18, [0, 1, 4, 5]) == picture("""
        rank 0: F               BB
        rank 1:  F            BB
          ...
        rank 4:     F   BB
        rank 5:      FBB
    """)


def test_what_is_shorter_than_a_letter_is_one():
    timeline = simulate(gpipe(2, 1), Costs.of([0.01, 10.0], [0.01, 10.0]))
    assert strip(timeline, 8 + 10, [0, 1]).splitlines()[0] == "rank 0: F        B"
