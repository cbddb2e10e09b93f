"""The schedules: their pictures, what they hold, how long they take, and those that users write."""

import inspect

import pytest

from autopipe.errors import ScheduleError
from autopipe.report.draw_text import draw
from autopipe.schedules.generators import (
    eager_one_f_one_b,
    forward_only,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from autopipe.schedules.instructions import (
    Instruction,
    Kind,
    format_programs,
    holders,
    parse_programs,
)
from autopipe.schedules.registry import SCHEDULES, flying, in_flight, make
from autopipe.schedules.simulate import Costs, simulate
from tests.support.long import sampled
from tests.support.schedule_pictures import every, picture

FINAL = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)  # these end a micro-batch in a stage


def run(programs, forward=1.0, backward=2.0):
    """Compute alone, transfers free."""
    return simulate(programs, Costs.even(len(holders(programs)), forward, backward))


def picture_in(function):
    """The rows of the picture in a docstring."""
    lines = inspect.getdoc(function).splitlines()
    return "\n".join(line.strip() for line in lines if line.startswith("    rank "))


@pytest.mark.parametrize(
    ("generate", "arguments"),
    [
        (naive, (3, 2)),
        (gpipe, (3, 4)),
        (one_f_one_b, (3, 5)),
        (eager_one_f_one_b, (3, 5, [1, 1])),
        (interleaved, (2, 4, 2)),
        (zb_h1, (3, 5)),
        (zb_v, (2, 4)),
        (forward_only, ([0, 1, 0, 1], 4)),
    ],
)
def test_the_pictures_in_the_docstrings_are_true(generate, arguments):
    assert draw(run(generate(*arguments))) == picture_in(generate)


def test_fewer_micro_batches_than_ranks():
    assert draw(run(one_f_one_b(4, 2))) == picture("""
        rank 0: F0 F1                         B0---    B1---
        rank 1:    F0 F1                B0---    B1---
        rank 2:       F0 F1       B0---    B1---
        rank 3:          F0 B0--- F1 B1---
    """)


def test_a_short_round_comes_first():
    """Three micro-batches in rounds of two: micro-batch 0 goes through both chunks alone."""
    assert format_programs(interleaved(2, 3, 2)) == picture("""
        rank 0: 0F0 2F0 0F1 0F2 2B0 2F1 2F2 0B0 2B1 2B2 0B1 0B2
        rank 1: 1F0 3F0 3B0 1F1 1F2 1B0 3F1 3B1 3F2 3B2 1B1 1B2
    """)


def test_one_rank_is_gradient_accumulation():
    for generate in naive, one_f_one_b:
        assert format_programs(generate(1, 3)) == "rank 0: 0F0 0B0 0F1 0B1 0F2 0B2"
    assert format_programs(gpipe(1, 3)) == "rank 0: 0F0 0F1 0F2 0B0 0B1 0B2"
    assert format_programs(zb_h1(1, 2)) == "rank 0: 0F0 0I0 0W0 0F1 0I1 0W1"
    assert format_programs(zb_v(1, 2)) == (
        "rank 0: 0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"
    )
    assert format_programs(interleaved(1, 2, 2)) == "rank 0: 0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"


def test_stages_lie_on_ranks_one_each_in_turns_or_in_a_v():
    assert holders(one_f_one_b(3, 1)) == (0, 1, 2)
    assert holders(interleaved(3, 1, 2)) == (0, 1, 2, 0, 1, 2)
    assert holders(zb_v(3, 1)) == (0, 1, 2, 2, 1, 0)


def test_every_micro_batch_runs_once_in_every_stage_and_in_order():
    """And F before B; I before W. That no rank waits for good, running them shows.

    With 1 to 13 micro-batches; with every third number by default.
    """
    for p in range(1, 7):
        for m in sampled(range(1, 14), of=3):
            for ask, programs in every(p, m):
                split = SCHEDULES[ask["name"]].splits
                kinds = [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]
                kinds = kinds if split else [Kind.FORWARD, Kind.BACKWARD]
                ranks = holders(programs)
                assert len(ranks) == p * ask.get("chunks", 1)
                for stage, rank in enumerate(ranks):
                    for kind in kinds:
                        found = [i for i in programs[rank] if i.stage == stage and i.kind is kind]
                        assert found == [Instruction(kind, stage, k) for k in range(m)]
                assert sum(map(len, programs)) == len(ranks) * len(kinds) * m
                run(programs)


def test_interleaved_runs_for_every_number_of_micro_batches():
    """1 to 20 of them; every sixth by default."""
    for p in range(1, 9):
        for chunks in range(1, 5):
            for m in sampled(range(1, 21), of=6):
                run(interleaved(p, m, chunks))


# What is held.


def held(programs):
    """The most chunks' activations on each rank at once, from F to B or W."""
    peaks = []
    for program in programs:
        held = peak = 0
        for instruction in program:
            held += (instruction.kind is Kind.FORWARD) - (instruction.kind in FINAL)
            peak = max(peak, held)
        assert held == 0
        peaks.append(peak)
    return peaks


def test_the_laws_of_what_ranks_hold():
    """Those in the docstrings, in activations of one chunk."""
    for p in range(1, 9):
        for m in range(1, 21):
            assert held(naive(p, m)) == [1] * p
            assert held(gpipe(p, m)) == [m] * p
            assert held(one_f_one_b(p, m)) == [min(m, p - i) for i in range(p)]
            assert held(zb_h1(p, m)) == [min(m, p)] * p
            assert max(held(zb_v(p, m))) == min(2 * m, 2 * p)
            depths = [j % 3 for j in range(p - 1)]
            assert held(eager_one_f_one_b(p, m, depths)) == [
                min(m, p - i + sum(depths[i:])) for i in range(p)
            ]
            for v in range(1, 5):
                law = [(v - 1) * p + 2 * (p - i) - 1 for i in range(p)]
                found = held(interleaved(p, m, v))
                if m % p == 0:
                    assert found == [min(v * m, most) for most in law]
                else:
                    assert all(one <= most for one, most in zip(found, law, strict=True))


def test_interleaved_with_one_chunk_is_eager_1f1b_of_depth_1():
    for p in range(1, 6):
        for m in range(1, 12):
            assert interleaved(p, m, 1) == eager_one_f_one_b(p, m, [1] * (p - 1))


def test_in_flight_is_what_counting_gives():
    """F takes hold of a micro-batch's activations in its stage, B lets go of them, or W."""
    for p in range(1, 6):
        for m in (*range(1, 12), 21, 34):
            for ask, programs in every(p, m):
                for stage, rank in enumerate(holders(programs)):
                    own = [i for i in programs[rank] if i.stage == stage]
                    (peak,) = held([own])
                    assert flying(programs[rank], stage) == peak
                    assert in_flight(ranks=p, micro_batches=m, stage=stage, **ask) == peak


def test_a_rank_that_runs_one_stage_ahead_of_another_holds_them_apart():
    program = parse_programs("rank 0: 0F0 0F1 1F0 1B0 0I0 0F2 0W0 1F1 1B1 0I1 0W1")[0]
    assert flying(program, 0) == 3  # F2 comes after I0, but before W0
    assert flying(program, 1) == 1


# Time.


def test_stop_and_wait_takes_as_long_as_one_rank():
    for p in range(1, 5):
        for m in range(1, 5):
            assert run(naive(p, m)).seconds == p * m * 3.0


def test_interleaving_divides_the_bubble_by_the_number_of_chunks():
    """(p - 1)(F + B) of a chunk are left, where 1F1B leaves (p - 1)(F + B) of v chunks."""
    for p in range(1, 7):
        for v in range(2, 5):
            for m in range(p, 4 * p, p):
                assert run(interleaved(p, m, v)).seconds == (v * m + p - 1) * 3.0


def test_a_short_round_takes_no_longer_than_a_full_one():
    for p in range(1, 7):
        for m in sampled(range(1, 20), of=4):
            full = m + -m % p
            assert run(interleaved(p, m, 2)).seconds <= run(interleaved(p, full, 2)).seconds


def test_zb_h1_leaves_a_third_of_the_bubble_of_1f1b():
    """(p - 1)(F + I - W) with F = I = W, where 1F1B leaves (p - 1)(F + I + W)."""
    for p in range(1, 9):
        for m in sampled(range(p, 3 * p), of=3):
            assert run(zb_h1(p, m)).seconds == 3 * m + (p - 1)
            assert run(one_f_one_b(p, m)).seconds == 3 * m + 3 * (p - 1)


def test_zb_v_has_no_bubble():
    """With F = I = W and at least 2p micro-batches no rank waits between its first and its last.

    The last rank cannot start before F0 has come through the p - 1 others.
    """
    for p in range(1, 9):
        for m in sampled(range(2 * p, 5 * p), of=4):
            found = run(zb_v(p, m))
            assert found.seconds == 6 * m + (p - 1)
            for rank in range(p):
                own = [
                    span
                    for span in found.spans
                    if span.rank == rank and span.instruction.kind in (Kind.FORWARD, *SPLIT)
                ]
                assert own[0].start == rank
                assert own[-1].end - own[0].start == 6 * m


SPLIT = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def test_zb_v_with_few_micro_batches_is_no_slower_than_zb_h1():
    """Compared on the same model: a chunk of one is half a stage of the other."""
    for p in range(1, 9):
        for m in sampled(range(1, 2 * p), of=3):
            assert run(zb_v(p, m), 0.5, 1.0).seconds <= run(zb_h1(p, m)).seconds


def test_an_evaluation_keeps_a_full_pipeline_full():
    """Every rank computes without a pause from when the first micro-batch reaches it."""
    for p in range(1, 6):
        for v in range(1, 4):
            for m in range(p, 4 * p, p):
                ranks = [stage % p for stage in range(p * v)]
                assert run(forward_only(ranks, m)).seconds == v * m + p - 1


def test_an_evaluation_runs_on_any_ranks():
    assert format_programs(forward_only([0, 1, 1, 0], 3)) == picture("""
        rank 0: 0F0 0F1 3F0 3F1 0F2 3F2
        rank 1: 1F0 1F1 2F0 2F1 1F2 2F2
    """)


# By name.


def test_make_calls_the_generator_of_a_name():
    assert make("naive", 3, 4) == naive(3, 4)
    assert make("gpipe", 3, 4) == gpipe(3, 4)
    assert make("1f1b", 3, 4) == one_f_one_b(3, 4)
    assert make("eager-1f1b", 3, 4, depths=(2, 1)) == eager_one_f_one_b(3, 4, (2, 1))
    assert make("eager-1f1b", 3, 4) == one_f_one_b(3, 4)
    assert make("interleaved", 3, 4, chunks=2) == interleaved(3, 4, 2)
    assert make("zb-h1", 3, 4) == zb_h1(3, 4)
    assert make("zb-v", 3, 4, chunks=2) == zb_v(3, 4)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"name": "zigzag"},
            "there is no schedule 'zigzag'\nhint: the schedules are naive, gpipe, 1f1b, "
            "eager-1f1b, interleaved, zb-h1, zb-v",
        ),
        (
            {"name": "interleaved"},
            "schedule interleaved puts at least 2 stages on each rank, found 1\n"
            "hint: 1f1b is for one stage on each rank",
        ),
        (
            {"name": "zb-v"},
            "schedule zb-v puts 2 stages on each rank, found 1\n"
            "hint: 1f1b is for one stage on each rank",
        ),
        (
            {"name": "1f1b", "chunks": 2},
            "schedule 1f1b puts 1 stage on each rank, found 2\n"
            "hint: interleaved takes any number from 2 on",
        ),
        (
            {"name": "zb-h1", "depths": (1, 1)},
            "schedule zb-h1 takes no depths, found 1, 1\nhint: eager-1f1b does",
        ),
        (
            {"name": "eager-1f1b", "depths": (1,)},
            "expected a depth for each of 2 boundaries, found 1\n"
            "hint: a depth of 0 at every boundary is 1f1b",
        ),
        (
            {"name": "eager-1f1b", "depths": (1, -1)},
            "expected a depth of at least 0 at boundary 1|2, found -1",
        ),
    ],
)
def test_what_cannot_be_made_is_refused(arguments, sentence):
    with pytest.raises(ScheduleError) as error:
        make(ranks=3, micro_batches=4, **arguments)
    assert str(error.value) == sentence
    with pytest.raises(ScheduleError):
        in_flight(ranks=3, micro_batches=4, stage=0, **arguments)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_or_no_micro_batch_is_refused(name):
    chunks = SCHEDULES[name].chunks or 2
    with pytest.raises(ScheduleError, match="needs at least 1 rank, found 0"):
        make(name, 0, 4, chunks=chunks)
    with pytest.raises(ScheduleError, match="needs at least 1 micro-batch, found 0"):
        make(name, 4, 0, chunks=chunks)


def test_no_stage_and_no_chunk_are_refused():
    with pytest.raises(ScheduleError, match="needs at least 1 rank, found 0"):
        forward_only([], 4)
    with pytest.raises(ScheduleError, match="needs at least 1 chunk, found 0"):
        interleaved(2, 4, 0)


# Those that users write.
