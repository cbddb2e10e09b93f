"""Programs of compute: their pictures, their text, what they hold and how long they take."""

import inspect
import textwrap

import pytest

from autopipe.errors import ScheduleError
from autopipe.schedule import (
    SCHEDULES,
    Flow,
    Instruction,
    Kind,
    draw,
    format_programs,
    forward_only,
    gpipe,
    in_flight,
    one_f_one_b,
    parse,
    parse_programs,
    timeline,
)


def picture(text):
    return textwrap.dedent(text).strip("\n")


def picture_in(function):
    """The rows of the picture in a docstring."""
    lines = inspect.getdoc(function).splitlines()
    return picture("\n".join(line for line in lines if line.startswith("    rank ")))


def test_the_pictures_in_the_docstrings_are_true():
    assert draw(gpipe(3, 4)) == picture_in(gpipe)
    assert draw(one_f_one_b(3, 5)) == picture_in(one_f_one_b)


def test_fewer_micro_batches_than_stages():
    assert draw(one_f_one_b(4, 2)) == picture("""
        rank 0: F0 F1                         B0---    B1---
        rank 1:    F0 F1                B0---    B1---
        rank 2:       F0 F1       B0---    B1---
        rank 3:          F0 B0--- F1 B1---
    """)


def test_one_stage_is_gradient_accumulation():
    assert format_programs(one_f_one_b(1, 3)) == "rank 0: 0F0 0B0 0F1 0B1 0F2 0B2"
    assert format_programs(gpipe(1, 3)) == "rank 0: 0F0 0F1 0F2 0B0 0B1 0B2"


def test_evaluation_is_forwards_alone():
    assert draw(forward_only(2, 3)) == picture("""
        rank 0: F0 F1 F2
        rank 1:    F0 F1 F2
    """)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_micro_batch_goes_forward_once_and_backward_once_in_order(name):
    for p in range(1, 9):
        for m in range(1, 17):
            for stage, program in enumerate(SCHEDULES[name](p, m)):
                for kind in (Kind.FORWARD, Kind.BACKWARD):
                    expected = [Instruction(kind, stage, k) for k in range(m)]
                    assert [i for i in program if i.kind is kind] == expected
                assert len(program) == 2 * m


@pytest.mark.parametrize("name", SCHEDULES)
def test_in_flight_is_what_counting_gives(name):
    """F takes hold of a micro-batch's activations, B lets go of them."""
    for p in range(1, 9):
        for m in range(1, 17):
            for stage, program in enumerate(SCHEDULES[name](p, m)):
                held = peak = 0
                for instruction in program:
                    held += 1 if instruction.kind is Kind.FORWARD else -1
                    peak = max(peak, held)
                assert in_flight(name, p, m, stage) == peak


def test_an_unknown_schedule_is_refused_with_the_known_ones():
    with pytest.raises(ScheduleError) as error:
        in_flight("zigzag", 2, 2, 0)
    assert str(error.value) == (
        "there is no schedule 'zigzag'\nhint: the schedules are gpipe, 1f1b"
    )


@pytest.mark.parametrize("generate", [gpipe, one_f_one_b, forward_only])
def test_no_stage_or_no_micro_batch_is_refused(generate):
    with pytest.raises(ScheduleError, match="needs at least 1 stage, found 0"):
        generate(0, 4)
    with pytest.raises(ScheduleError, match="needs at least 1 micro-batch, found 0"):
        generate(4, 0)


# The text form.


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("0F3", Instruction(Kind.FORWARD, 0, 3)),
        ("1B3", Instruction(Kind.BACKWARD, 1, 3)),
        ("1I3", Instruction(Kind.BACKWARD_INPUT, 1, 3)),
        ("1W3", Instruction(Kind.BACKWARD_WEIGHT, 1, 3)),
        ("1POST_F3<0", Instruction(Kind.POST, 1, 3, Flow.ACTIVATION, 0)),
        ("1WAIT_F3<0", Instruction(Kind.WAIT, 1, 3, Flow.ACTIVATION, 0)),
        ("0SEND_F3>1", Instruction(Kind.SEND, 0, 3, Flow.ACTIVATION, 1)),
        ("0FREE_F3>1", Instruction(Kind.FREE, 0, 3, Flow.ACTIVATION, 1)),
        ("0POST_B3<1", Instruction(Kind.POST, 0, 3, Flow.GRADIENT, 1)),
        ("12SEND_B34>10", Instruction(Kind.SEND, 12, 34, Flow.GRADIENT, 10)),
        ("0REDUCE", Instruction(Kind.REDUCE, 0)),
    ],
)
def test_the_text_form_reads_back(text, instruction):
    assert str(instruction) == text
    assert parse(text) == instruction


@pytest.mark.parametrize(
    "token",
    ["", "F3", "0X3", "0F", "00F3", "0F-1", "0SEND_F3", "0SEND_F3<1", "1POST_F3>0", "0REDUCE1"],
)
def test_a_bad_token_is_named(token):
    with pytest.raises(ScheduleError) as error:
        parse(token)
    assert error.value.message == f"expected an instruction, found {token!r}"


def test_programs_read_back():
    programs = one_f_one_b(4, 6)
    assert parse_programs(format_programs(programs)) == programs
    assert parse_programs("\n  rank 0: 0F0\n\n  rank 1:\n") == ((parse("0F0"),), ())


@pytest.mark.parametrize("line", ["rank 1: 0F0", "0F0 0F1", "rank zero: 0F0"])
def test_a_line_of_another_form_is_named(line):
    with pytest.raises(ScheduleError) as error:
        parse_programs(line)
    assert error.value.message == f"expected a line `rank 0: ...`, found {line!r}"


def test_both_ends_of_a_transfer_are_on_one_channel():
    ends = ["0SEND_F3>1", "0FREE_F3>1", "1POST_F3<0", "1WAIT_F3<0"]
    assert {parse(end).channel for end in ends} == {(0, 1, Flow.ACTIVATION)}
    with pytest.raises(ScheduleError, match="0F3 is no transfer and has no channel"):
        _ = parse("0F3").channel


# Time.


@pytest.mark.parametrize("generate", [gpipe, one_f_one_b])
def test_equal_stages_take_the_textbook_time(generate):
    """(m + p - 1)(F + B): m micro-batches through one stage, and p - 1 more to fill and drain."""
    for p in range(1, 9):
        for m in range(1, 17):
            end = max(span.end for span in timeline(generate(p, m), 2.0, 3.0))
            assert end == (m + p - 1) * (2.0 + 3.0)


def test_unequal_stages_run_at_the_pace_of_the_slowest():
    """1F1B on two stages, the second slow.

    F0 of stage 0 until 1, then stage 1 without a pause: 3 (1 + 4) until 16; B2 of stage 0 until 18.
    """
    programs = one_f_one_b(2, 3)
    spans = timeline(programs, forward=[1.0, 1.0], backward=[2.0, 4.0])
    assert max(span.end for span in spans) == 1.0 + 3 * (1.0 + 4.0) + 2.0
    assert draw(programs, [1.0, 1.0], [2.0, 4.0]) == picture("""
        rank 0: F0 F1             B0--- F2       B1---          B2---
        rank 1:    F0 B0--------- F1 B1--------- F2 B2---------
    """)


def test_the_unit_of_a_drawing_is_in_seconds():
    assert draw(gpipe(2, 2), 0.5, 1.0, unit=0.5) == draw(gpipe(2, 2), 1.0, 2.0)
    assert draw(gpipe(1, 1), 2.0, 4.0, unit=1.0) == "rank 0: F0--- B0---------"


def test_a_split_backward_halves_its_time_and_fills_the_bubble():
    programs = parse_programs("""
        rank 0: 0F0 0F1 0I0 0W0 0I1 0W1
        rank 1: 1F0 1I0 1F1 1I1 1W0 1W1
    """)
    assert draw(programs) == picture("""
        rank 0: F0 F1    I0 W0 I1 W1
        rank 1:    F0 I0 F1 I1 W0 W1
    """)


def test_transfers_take_no_time_in_a_timeline():
    programs = parse_programs("""
        rank 0: 0F0 0SEND_F0>1 0FREE_F0>1
        rank 1: 1POST_F0<0 1WAIT_F0<0 1F0
    """)
    assert [(str(s.instruction), s.start, s.end) for s in timeline(programs)] == [
        ("0F0", 0.0, 1.0),
        ("1F0", 1.0, 2.0),
    ]


def test_programs_that_wait_for_what_never_runs_have_no_timeline():
    with pytest.raises(ScheduleError) as error:
        timeline(parse_programs("rank 0: 0F0 0B1\nrank 1: 1F0 1B0"))
    assert str(error.value) == "rank 0 waits at 0B1 for 0F1, which never runs"
