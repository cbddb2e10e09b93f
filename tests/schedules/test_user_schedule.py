"""A schedule from a file: any order that can be meant is read, each mistake has its sentence."""

import pytest

from autopipe.errors import ScheduleError
from autopipe.schedules.instructions import format_programs, holders
from autopipe.schedules.user_schedule import parse
from tests.support.schedule_pictures import every, picture


def test_a_written_schedule_is_read_in_any_order():
    """Two stages on a rank, backwards whole and in halves, micro-batches in another order."""
    programs = parse("""
        # mine
        rank 0: 0F1 0F0 2F0 2B0 2F1 2B1 0B0 0B1   # the last stage is here too
            # and it goes on

        rank 1: 1F1 1F0 1I0 1I1 1W1 1W0
    """)
    assert format_programs(programs) == picture("""
        rank 0: 0F1 0F0 2F0 2B0 2F1 2B1 0B0 0B1
        rank 1: 1F1 1F0 1I0 1I1 1W1 1W0
    """)
    assert holders(programs) == (0, 1, 0)


def test_every_schedule_reads_back_as_a_written_one():
    for _, programs in every(3, 4):
        assert parse(format_programs(programs)) == programs


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ("", "expected a schedule, found no instruction"),
        ("0F0 0B0", "expected a line `rank 0: ...`, found '0F0 0B0'"),
        ("rank 0: 0F0 0Q0", "rank 0: expected an instruction, found '0Q0'"),
        ("rank 0: 0F0 0B0\nrank 1:", "rank 1 has nothing to do"),
        ("rank 0: 0F0 0B0 0REDUCE", "rank 0: expected compute alone, found 0REDUCE"),
        (
            "rank 0: 0F0 0B0\nrank 1: 1WAIT_F0<0 1F0 1B0",
            "rank 1: expected compute alone, found 1WAIT_F0<0",
        ),
        ("rank 0: 0F0 0B0\nrank 1: 0F1 0B1", "stage 0 is on ranks 0 and 1"),
        (
            "rank 0: 0F0 0B0\nrank 1: 2F0 2B0",
            "stage 1 is on no rank, and stage 2 does",
        ),
        ("rank 0: 0F0 0B0 0F0", "rank 0: 0F0 appears twice"),
        ("rank 0: 0F0 0B0 0B0", "rank 0: 0B0 appears twice"),
        ("rank 0: 0B0 0F0", "rank 0: 0B0 needs 0F0 before it, which stands after it"),
        ("rank 0: 0B0", "rank 0: 0B0 needs 0F0 before it, which is missing"),
        ("rank 0: 0F0 0W0 0I0", "rank 0: 0W0 needs 0I0 before it, which stands after it"),
        ("rank 0: 0F0 0B0 0W0", "rank 0: 0W0 needs 0I0 before it, which is missing"),
        (
            "rank 0: 0F0 0I0 0B0 0W0",
            "rank 0: both 0B0 and 0I0 stand, a whole backward and half of one",
        ),
        (
            "rank 0: 0F0 0F1 0B0",
            "rank 0: 0B1 is missing; every stage runs micro-batches 0 to 1, as 0F1 has it",
        ),
        (
            "rank 0: 0F0 0I0",
            "rank 0: 0W0 is missing; every stage runs micro-batches 0 to 0, as 0F0 has it",
        ),
        (
            "rank 0: 0F0 0B0 0F2 0B2",
            "rank 0: 0F1 is missing; every stage runs micro-batches 0 to 2, as 0F2 has it",
        ),
        (
            "rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1B0",
            "rank 1: 1F1 is missing; every stage runs micro-batches 0 to 1, as 0F1 has it",
        ),
    ],
)
def test_each_mistake_in_a_written_schedule_has_its_sentence(broken, sentence):
    with pytest.raises(ScheduleError) as error:
        parse(broken)
    assert error.value.message == sentence
