"""Programs that break a rule are refused with a sentence that names it."""

import pytest

from autopipe.errors import ScheduleError
from autopipe.schedules.deadlock import check
from autopipe.schedules.generators import forward_only, zb_h1, zb_v
from autopipe.schedules.instructions import format_programs, parse_programs
from autopipe.schedules.transfers import Edge, insert

# A whole pipeline of two stages, one micro-batch, to break in every way.
WHOLE = """
    rank 0: 0POST_B0<1 0F0 0SEND_F0>1 0WAIT_B0<1 0FREE_F0>1 0REDUCE 0B0 0STEP
    rank 1: 1POST_F0<0 1WAIT_F0<0 1F0 1REDUCE 1B0 1SEND_B0>0 1FREE_B0>0 1STEP
"""


def refusal(text):
    with pytest.raises(ScheduleError) as error:
        check(parse_programs(text))
    return error.value.message


def test_the_whole_one_keeps_them():
    check(parse_programs(WHOLE))


@pytest.mark.parametrize(
    ("line", "broken", "sentence"),
    [
        (
            "0F0 0SEND_F0>1",
            "0SEND_F0>1 0F0",
            "rank 0: 0SEND_F0>1 needs 0F0 before it, which stands after it",
        ),
        ("0F0 0SEND", "0SEND", "rank 0: 0SEND_F0>1 needs 0F0 before it, which is missing"),
        (
            "0FREE_F0>1 0REDUCE",
            "0REDUCE",
            "rank 0: 0SEND_F0>1 needs 0FREE_F0>1 after it, which is missing",
        ),
        (
            "0FREE_F0>1 0REDUCE 0B0",
            "0REDUCE 0B0 0FREE_F0>1",
            "rank 0: 0FREE_F0>1 needs 0B0 after it, which stands before it",
        ),
        (
            "0WAIT_B0<1 0FREE_F0>1 0REDUCE 0B0",
            "0FREE_F0>1 0REDUCE 0B0 0WAIT_B0<1",
            "rank 0: 0WAIT_B0<1 needs 0B0 after it, which stands before it",
        ),
        ("1WAIT_F0<0 1F0", "1F0", "rank 1: 1POST_F0<0 needs 1WAIT_F0<0 after it, which is missing"),
        (
            "1POST_F0<0 1WAIT_F0<0",
            "1WAIT_F0<0 1POST_F0<0",
            "rank 1: 1WAIT_F0<0 needs 1POST_F0<0 before it, which stands after it",
        ),
        (
            "1F0 1REDUCE 1B0",
            "1REDUCE 1B0 1F0",
            "rank 1: 1B0 needs 1F0 before it, which stands after it",
        ),
        ("1F0", "1F0 1F0", "rank 1: 1F0 appears twice"),
        ("0SEND_F0>1", "0SEND_F0>1 0SEND_F0>1", "rank 0: 0SEND_F0>1 appears twice"),
        ("1POST_F0<0 1WAIT_F0<0", "", "0SEND_F0>1 has no 1POST_F0<0: a transfer needs both ends"),
        ("1SEND_B0>0 1FREE_B0>0", "", "0POST_B0<1 has no 1SEND_B0>0: a transfer needs both ends"),
        ("1F0", "1F0 0F1", "stage 0 is on ranks 0 and 1"),
        # Sums begin in the last backward, not before and not after it, and are waited for.
        ("0STEP", "0STEP 0F1", "rank 0: 0F1 stands after 0STEP, which ends a program"),
        ("0STEP", "0STEP 0STEP", "rank 0: 0STEP appears twice"),
        ("0STEP", "", "rank 0: 0STEP is missing: nobody waits for the sums"),
        ("0REDUCE", "", "rank 0: 0REDUCE is missing, and other stages have theirs"),
        (
            "1REDUCE 1B0 1SEND_B0>0",
            "1B0 1SEND_B0>0 1REDUCE",
            "rank 1: 1REDUCE needs the last backward of stage 1 after it",
        ),
        (
            "0FREE_F0>1 0REDUCE",
            "0REDUCE 0FREE_F0>1",
            "rank 0: 0REDUCE must stand right before 0B0, found 0FREE_F0>1",
        ),
        ("1B0", "1B0 1F1", "rank 1: 1F1 needs 1B1 after it, which is missing"),
        ("1B0", "1B0 1F1 1B1", "rank 1: 1REDUCE stands before 1B0, and 1B1 is the last"),
    ],
)
def test_each_rule_has_its_sentence(line, broken, sentence):
    assert line in WHOLE
    assert refusal(WHOLE.replace(line, broken)) == sentence


# One stage, backward split in two.
SPLIT = "rank 0: 0F0 0F1 0I0 0W0 0I1 0REDUCE 0W1 0STEP"


@pytest.mark.parametrize(
    ("line", "broken", "sentence"),
    [
        ("0I0 0W0", "0W0 0I0", "rank 0: 0W0 needs 0I0 before it, which stands after it"),
        ("0F1 0I0 0W0", "0F1", "rank 0: 0F0 needs 0B0 after it, which is missing"),
        ("0F0 0F1 0I0 0W0", "0F1 0W0", "rank 0: 0W0 needs 0I0 before it, which is missing"),
        ("0I0 0W0", "0I0", "rank 0: 0I0 needs 0W0 after it, which is missing"),
        ("0F1 0I0", "0I0", "rank 0: 0I1 needs 0F1 before it, which is missing"),
        ("0I1 0REDUCE", "0REDUCE 0I1", "rank 0: 0REDUCE must stand right before 0W1, found 0I1"),
    ],
)
def test_a_split_backward_has_its_own(line, broken, sentence):
    check(parse_programs(SPLIT))
    assert line in SPLIT
    assert refusal(SPLIT.replace(line, broken)) == sentence


def test_backward_may_be_split_for_some_micro_batches_and_not_for_others():
    check(parse_programs("rank 0: 0F0 0F1 0B0 0I1 0REDUCE 0W1 0STEP"))
    check(parse_programs("rank 0: 0F0 0F1 0I0 0W0 0REDUCE 0B1 0STEP"))


def test_the_first_break_in_a_program_is_the_one_that_is_told():
    text = WHOLE.replace("0F0 ", "").replace("0FREE_F0>1 ", "").replace("1FREE_B0>0 ", "")
    assert refusal(text) == "rank 0: 0SEND_F0>1 needs 0F0 before it, which is missing"


def test_each_stage_of_a_rank_has_its_own_sum():
    """Rank 0 of zb-v holds stages 0 and 3; their last weights come one after the other."""
    text = format_programs(insert(zb_v(2, 3), [Edge(s, s + 1, True) for s in range(3)], [2] * 3))
    check(parse_programs(text))
    assert text.count("0REDUCE 0W2") == text.count("3REDUCE 3W2") == 1
    assert refusal(text.replace("3REDUCE ", "")) == (
        "rank 0: 3REDUCE is missing, and other stages have theirs"
    )


def test_swapped_receives_would_swap_tensors_without_a_word():
    text = format_programs(insert(forward_only([0, 1], 3), [Edge(0, 1, True)], [3]))
    assert "1POST_F1<0 1POST_F2<0" in text
    assert refusal(text.replace("1POST_F1<0 1POST_F2<0", "1POST_F2<0 1POST_F1<0")) == (
        "transfer 1 from stage 0 to stage 1 is 0SEND_F1>1 at the source and 1POST_F2<0 at the "
        "target: tensors would be swapped"
    )


def test_waits_may_come_in_another_order_than_the_transfers():
    check(
        parse_programs("""
            rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0FREE_F0>1 0FREE_F1>1
            rank 1: 1POST_F0<0 1POST_F1<0 1WAIT_F1<0 1F1 1WAIT_F0<0 1F0
        """)
    )


def test_a_receive_that_is_posted_after_it_is_waited_for():
    """Window 0."""
    text = format_programs(insert(zb_h1(2, 2), [Edge(0, 1, True)], [1]))
    early, late = "1POST_F0<0 1WAIT_F0<0 1POST_F1<0 1F0", "1WAIT_F0<0 1POST_F0<0 1F0 1POST_F1<0"
    assert early in text
    assert refusal(text.replace(early, late)) == (
        "rank 1: 1WAIT_F0<0 needs 1POST_F0<0 before it, which stands after it"
    )


def test_micro_batches_need_no_particular_numbers():
    """They are only names: a huge one takes no room."""
    check(parse_programs("rank 0: 0F7 0F1000000000 0B1000000000 0B7"))
    assert refusal("rank 0: 0F7 0B1000000000 0B7") == (
        "rank 0: 0B1000000000 needs 0F1000000000 before it, which is missing"
    )


def test_a_program_may_be_empty():
    check(parse_programs("rank 0: 0F0 0B0\nrank 1:"))
    check(())
