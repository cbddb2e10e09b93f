"""What the pass puts around compute, in programs small enough to read."""

import inspect
import textwrap

import pytest

from autopipe.errors import ScheduleError
from autopipe.schedules.deadlock import check
from autopipe.schedules.generators import forward_only, gpipe, one_f_one_b
from autopipe.schedules.instructions import Channel, Flow, format_programs, parse_programs
from autopipe.schedules.lanes import window
from autopipe.schedules.transfers import Edge, insert
from tests.support.edges import chain


def text(programs):
    return [line.split(": ")[1] for line in format_programs(programs).splitlines()]


def words(lines):
    """A program that is written over several lines, as one."""
    return " ".join(textwrap.dedent(lines).split())


def test_the_columns_of_the_docstring_are_what_is_inserted():
    lines = inspect.getdoc(insert).splitlines()
    head = next(n for n, line in enumerate(lines) if line.split() == ["rank", "0", "rank", "1"])
    column = lines[head].index("rank 1")
    rows = lines[head + 1 : lines.index("", head)]
    left = words("\n".join(row[:column] for row in rows))
    right = words("\n".join(row[column:] for row in rows))
    assert text(insert(one_f_one_b(2, 3), [Edge(0, 1, gradient=True)], [1])) == [left, right]


def test_a_window_of_two_posts_two_ahead_and_keeps_two_posted():
    rank0, rank1 = text(insert(gpipe(2, 4), chain(2), [2]))
    assert rank1 == words("""
        1POST_F0<0 1POST_F1<0
        1WAIT_F0<0 1POST_F2<0 1F0
        1WAIT_F1<0 1POST_F3<0 1F1
        1WAIT_F2<0 1F2
        1WAIT_F3<0 1F3
        1B0 1SEND_B0>0
        1B1 1SEND_B1>0
        1B2 1FREE_B0>0 1SEND_B2>0
        1REDUCE 1B3 1FREE_B1>0 1SEND_B3>0
        1FREE_B2>0 1FREE_B3>0 1STEP
    """)
    # Sends F2 and F3 wait for F0 and F1 to be over; F2 and F3 are freed before their backward.
    assert rank0 == words("""
        0POST_B0<1 0POST_B1<1
        0F0 0SEND_F0>1
        0F1 0SEND_F1>1
        0F2 0FREE_F0>1 0SEND_F2>1
        0F3 0FREE_F1>1 0SEND_F3>1
        0WAIT_B0<1 0POST_B2<1 0B0
        0WAIT_B1<1 0POST_B3<1 0B1
        0WAIT_B2<1 0FREE_F2>1 0B2
        0WAIT_B3<1 0FREE_F3>1 0REDUCE 0B3
        0STEP
    """)


def test_a_window_wider_than_the_step_posts_every_receive_once():
    rank0, _ = text(insert(one_f_one_b(2, 2), chain(2), [9]))
    assert rank0.startswith("0POST_B0<1 0POST_B1<1 0F0 ") and rank0.count("POST") == 2


def test_receives_are_posted_in_the_order_in_which_they_are_needed():
    """The middle stage runs F0 F1 B0 F2 B1 B2."""
    _, middle, _ = text(insert(one_f_one_b(3, 3), chain(3), [2, 2]))
    assert middle.startswith("1POST_F0<0 1POST_F1<0 1POST_B0<2 1POST_B1<2 1WAIT_F0<0")


def test_a_skip_connection_meets_its_neighbours_in_a_fixed_order():
    """0 -> 1 -> 2 and 0 -> 2: from the first stage on, and back from the last one on."""
    edges = [Edge(1, 2, True), Edge(0, 2, True), Edge(0, 1, True)]
    programs = insert(one_f_one_b(3, 1), edges, [1, 1])
    assert programs == insert(one_f_one_b(3, 1), edges[::-1], [1, 1])
    assert text(programs) == [
        words("""
            0POST_B0<2 0POST_B0<1
            0F0 0SEND_F0>1 0SEND_F0>2
            0WAIT_B0<2 0WAIT_B0<1 0FREE_F0>1 0FREE_F0>2 0REDUCE 0B0
            0STEP
        """),
        words("""
            1POST_F0<0 1POST_B0<2
            1WAIT_F0<0 1F0 1SEND_F0>2
            1WAIT_B0<2 1FREE_F0>2 1REDUCE 1B0 1SEND_B0>0
            1FREE_B0>0 1STEP
        """),
        words("""
            2POST_F0<0 2POST_F0<1
            2WAIT_F0<0 2WAIT_F0<1 2F0
            2REDUCE 2B0 2SEND_B0>0 2SEND_B0>1
            2FREE_B0>0 2FREE_B0>1 2STEP
        """),
    ]


def test_an_edge_without_gradient_sends_nothing_back():
    rank0, rank1 = text(insert(one_f_one_b(2, 1), [Edge(0, 1, gradient=False)], [1]))
    assert rank0 == "0F0 0SEND_F0>1 0FREE_F0>1 0REDUCE 0B0 0STEP"
    assert rank1 == "1POST_F0<0 1WAIT_F0<0 1F0 1REDUCE 1B0 1STEP"


def test_evaluation_has_no_gradients_and_no_reduction():
    rank0, rank1 = text(insert(forward_only([0, 1], 3), chain(2), [1]))
    assert rank0 == words("""
        0F0 0SEND_F0>1
        0F1 0SEND_F1>1
        0F2 0FREE_F0>1 0SEND_F2>1
        0FREE_F1>1 0FREE_F2>1
    """)
    assert rank1 == words("""
        1POST_F0<0
        1WAIT_F0<0 1POST_F1<0 1F0
        1WAIT_F1<0 1POST_F2<0 1F1
        1WAIT_F2<0 1F2
    """)


def test_one_stage_has_nothing_to_send():
    assert text(insert(one_f_one_b(1, 2), [], [])) == ["0F0 0B0 0F1 0REDUCE 0B1 0STEP"]


def test_a_split_backward_sends_after_its_first_half_and_sums_in_its_last_second_one():
    programs = parse_programs("rank 0: 0F0 0I0 0F1 0I1 0W0 0W1\nrank 1: 1F0 1I0 1W0 1F1 1I1 1W1")
    rank0, rank1 = text(insert(programs, chain(2), [1]))
    assert rank0 == words("""
        0POST_B0<1
        0F0 0SEND_F0>1
        0WAIT_B0<1 0POST_B1<1 0FREE_F0>1 0I0
        0F1 0SEND_F1>1
        0WAIT_B1<1 0FREE_F1>1 0I1
        0W0
        0REDUCE 0W1
        0STEP
    """)
    assert rank1 == words("""
        1POST_F0<0
        1WAIT_F0<0 1POST_F1<0 1F0
        1I0 1SEND_B0>0
        1W0
        1WAIT_F1<0 1F1
        1I1 1SEND_B1>0
        1REDUCE 1W1
        1FREE_B0>0 1FREE_B1>0 1STEP
    """)


def test_stages_on_one_rank_exchange_tensors_like_any_others():
    """A V on two ranks: the channels 1 -> 2 and 2 -> 1 begin and end on rank 1."""
    programs = parse_programs("rank 0: 0F0 3F0 3B0 0B0\nrank 1: 1F0 2F0 2B0 1B0")
    rank0, rank1 = text(insert(programs, chain(4), [1, 1, 1]))
    assert rank0 == words("""
        3POST_F0<2 0POST_B0<1
        0F0 0SEND_F0>1
        3WAIT_F0<2 3F0
        3REDUCE 3B0 3SEND_B0>2
        0WAIT_B0<1 0FREE_F0>1 0REDUCE 0B0
        3FREE_B0>2 0STEP
    """)
    assert rank1 == words("""
        1POST_F0<0 2POST_F0<1 2POST_B0<3 1POST_B0<2
        1WAIT_F0<0 1F0 1SEND_F0>2
        2WAIT_F0<1 2F0 2SEND_F0>3
        2WAIT_B0<3 2FREE_F0>3 2REDUCE 2B0 2SEND_B0>1
        1WAIT_B0<2 1FREE_F0>2 1REDUCE 1B0 1SEND_B0>0
        2FREE_B0>1 1FREE_B0>0 1STEP
    """)


def test_receives_are_posted_as_they_are_sent_and_waited_for_as_they_are_needed():
    """Stage 0 sends 0 1 2 3, stage 1 takes 2 0 3 1: with a window of 1 three stand posted at once.

    Backward is the other way about: stage 1 sends 3 2 1 0, stage 0 takes 0 1 2 3.
    """
    programs = parse_programs("""
        rank 0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
        rank 1: 1F2 1F0 1F3 1F1 1B3 1B2 1B1 1B0
    """)
    full = insert(programs, chain(2), [1])
    check(full)
    rank0, rank1 = text(full)
    assert rank1 == words("""
        1POST_F0<0 1POST_F1<0 1POST_F2<0
        1WAIT_F2<0 1F2
        1WAIT_F0<0 1POST_F3<0 1F0
        1WAIT_F3<0 1F3
        1WAIT_F1<0 1F1
        1B3 1SEND_B3>0
        1B2 1SEND_B2>0
        1B1 1FREE_B3>0 1SEND_B1>0
        1REDUCE 1B0 1FREE_B2>0 1SEND_B0>0
        1FREE_B1>0 1FREE_B0>0 1STEP
    """)
    assert rank0 == words("""
        0POST_B3<1 0POST_B2<1 0POST_B1<1 0POST_B0<1
        0F0 0SEND_F0>1
        0F1 0SEND_F1>1
        0F2 0FREE_F0>1 0SEND_F2>1
        0F3 0FREE_F1>1 0SEND_F3>1
        0WAIT_B0<1 0B0
        0WAIT_B1<1 0B1
        0WAIT_B2<1 0FREE_F2>1 0B2
        0WAIT_B3<1 0FREE_F3>1 0REDUCE 0B3
        0STEP
    """)


def test_frees_follow_the_order_of_sending():
    """Stage 0 sends 3 1 0 2: before 0 goes, 3 has to be over, and before 2, 1."""
    programs = parse_programs("""
        rank 0: 0F3 0F1 0F0 0F2
        rank 1: 1F3 1F1 1F0 1F2
    """)
    rank0, _ = text(insert(programs, chain(2), [1]))
    assert rank0 == words("""
        0F3 0SEND_F3>1
        0F1 0SEND_F1>1
        0F0 0FREE_F3>1 0SEND_F0>1
        0F2 0FREE_F1>1 0SEND_F2>1
        0FREE_F0>1 0FREE_F2>1
    """)


def test_a_source_that_must_run_ahead_may():
    """Rank 0 runs all of stage 0 before any of stage 1, with one receive posted until then.

    With two sends under way at most, it would wait at the fourth for a receive that it is to post
    itself, later.
    """
    programs = parse_programs("rank 0: 0F0 0F1 0F2 0F3 1F0 1F1 1F2 1F3")
    (only,) = text(insert(programs, chain(2), [1]))
    assert only == words("""
        1POST_F0<0
        0F0 0SEND_F0>1
        0F1 0SEND_F1>1
        0F2 0SEND_F2>1
        0F3 0FREE_F0>1 0SEND_F3>1
        1WAIT_F0<0 1POST_F1<0 1F0
        1WAIT_F1<0 1POST_F2<0 1F1
        1WAIT_F2<0 1POST_F3<0 1F2
        1WAIT_F3<0 1F3
        0FREE_F1>1 0FREE_F2>1 0FREE_F3>1
    """)


def test_a_channel_takes_the_widest_window_it_spans():
    windows = [1, 4, 2]
    assert window(Channel(0, 1, Flow.ACTIVATION), windows) == 1
    assert window(Channel(0, 3, Flow.ACTIVATION), windows) == 4
    assert window(Channel(3, 2, Flow.GRADIENT), windows) == 2


@pytest.mark.parametrize(
    ("edges", "windows", "message"),
    [
        ([Edge(1, 0, True)], [2], "expected an edge to a later one of 2 stages, found 1 -> 0"),
        ([Edge(0, 2, True)], [2], "expected an edge to a later one of 2 stages, found 0 -> 2"),
        ([Edge(0, 1, True), Edge(0, 1, False)], [2], "the edge 0 -> 1 is given twice"),
        ([], [2, 2], "expected a window for each of 1 boundaries, found 2"),
        ([], [0], "expected a window of at least 1 at boundary 0|1, found 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(edges, windows, message):
    with pytest.raises(ScheduleError) as error:
        insert(one_f_one_b(2, 2), edges, windows)
    assert str(error.value) == message


def test_stages_that_exchange_tensors_run_the_same_micro_batches():
    with pytest.raises(ScheduleError) as error:
        insert(parse_programs("rank 0: 0F0 0F1\nrank 1: 1F0"), chain(2), [1])
    assert str(error.value) == (
        "stage 0 runs F1, and stage 1, with which it exchanges tensors, never does"
    )


def test_the_pass_runs_once():
    programs = insert(one_f_one_b(2, 1), chain(2), [1])
    with pytest.raises(ScheduleError, match="found 0POST_B0<1: these programs have their"):
        insert(programs, chain(2), [1])
