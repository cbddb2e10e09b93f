"""The words of a schedule: how instructions and programs are written, and who holds which stage."""

import pytest

from autopipe.errors import ScheduleError
from autopipe.schedules.instructions import (
    Flow,
    Instruction,
    Kind,
    format_programs,
    holders,
    parse,
    parse_programs,
)


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
        ("2STEP", Instruction(Kind.STEP, 2)),
    ],
)
def test_the_text_form_reads_back(text, instruction):
    assert str(instruction) == text
    assert parse(text) == instruction


@pytest.mark.parametrize(
    "token",
    [
        "",
        "F3",
        "0X3",
        "0F",
        "00F3",
        "0F-1",
        "0SEND_F3",
        "0SEND_F3<1",
        "1POST_F3>0",
        "0REDUCE1",
        "0STEP0",
    ],
)
def test_a_bad_token_is_named(token):
    with pytest.raises(ScheduleError) as error:
        parse(token)
    assert error.value.message == f"expected an instruction, found {token!r}"


def test_programs_read_back():
    text = "rank 0: 0F0 0SEND_F0>1 0FREE_F0>1 0REDUCE 0B0 0STEP\nrank 1:\nrank 2: 1POST_F0<0"
    assert format_programs(parse_programs(text)) == text
    assert parse_programs("\n  rank 0: 0F0\n\n  rank 1:\n") == ((parse("0F0"),), ())


@pytest.mark.parametrize("line", ["rank 1: 0F0", "0F0 0F1", "rank zero: 0F0"])
def test_a_line_of_another_form_is_named(line):
    with pytest.raises(ScheduleError) as error:
        parse_programs(line)
    assert error.value.message == f"expected a line `rank 0: ...`, found {line!r}"


def test_a_bad_token_is_named_with_its_rank():
    with pytest.raises(ScheduleError) as error:
        parse_programs("rank 0: 0F0\nrank 1: 1F0 1X0")
    assert str(error.value) == (
        "rank 1: expected an instruction, found '1X0'\nhint: instructions look like 0F3, 1B3, "
        "1POST_F3<0, 1WAIT_F3<0, 0SEND_F3>1, 0REDUCE, 0STEP"
    )


def test_both_ends_of_a_transfer_are_on_one_channel():
    ends = ["0SEND_F3>1", "0FREE_F3>1", "1POST_F3<0", "1WAIT_F3<0"]
    assert {parse(end).channel for end in ends} == {(0, 1, Flow.ACTIVATION)}
    with pytest.raises(ScheduleError, match="0F3 is no transfer and has no channel"):
        _ = parse("0F3").channel


# Stages.


def test_who_holds_which_stage_is_read_off_the_programs():
    assert holders(parse_programs("rank 0: 0F0 0B0\nrank 1: 1F0 1B0")) == (0, 1)
    assert holders(parse_programs("rank 0: 0F0 3F0 3B0 0B0\nrank 1: 2F0 1F0")) == (0, 1, 1, 0)
    assert holders(parse_programs("rank 0: 0POST_B0<1\nrank 1:\nrank 2: 1REDUCE")) == (0, 2)
    assert holders(()) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: 0F0 1F0\nrank 1: 2F0 1B0", "stage 1 is on ranks 0 and 1"),
        ("rank 0: 0F0\nrank 1: 2F0", "stage 1 is on no rank, and stage 2 does"),
    ],
)
def test_each_stage_is_on_one_rank(text, message):
    with pytest.raises(ScheduleError) as error:
        holders(parse_programs(text))
    assert str(error.value) == message
