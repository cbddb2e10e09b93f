"""Programs that would wait for each other are refused with the cycle as a sentence."""

import random

import pytest

from autopipe.errors import ScheduleError
from autopipe.schedules.deadlock import check
from autopipe.schedules.generators import forward_only, one_f_one_b
from autopipe.schedules.instructions import Flow, format_programs, holders, parse_programs
from autopipe.schedules.registry import SCHEDULES, make
from autopipe.schedules.transfers import Edge, insert


def chain(num_stages):
    return [Edge(stage, stage + 1, gradient=True) for stage in range(num_stages - 1)]


def random_skips(num_stages, rng):
    """A chain, each of whose possible skip connections is there or not, with gradient or not."""
    skips = [(i, j) for i in range(num_stages) for j in range(i + 2, num_stages)]
    return chain(num_stages) + [
        Edge(i, j, rng.random() < 0.7) for i, j in skips if rng.random() < 0.4
    ]


def compute(name, ranks, micro_batches):
    """A schedule by its name, with two chunks and one micro-batch ahead where it takes such."""
    chunks = SCHEDULES[name].chunks or 2
    depths = (1,) * (ranks - 1) if name == "eager-1f1b" else ()
    return make(name, ranks, micro_batches, chunks=chunks, depths=depths)


def refusal(text, lanes=None):
    with pytest.raises(ScheduleError) as error:
        check(parse_programs(text), lanes)
    return error.value.message


def test_a_deadlock_is_followed_around_its_cycle():
    """Stage 0 wants gradient 0 before it sends activation 1, stage 1 wants them the other way."""
    assert refusal("""
        rank 0: 0POST_B0<1 0F0 0SEND_F0>1 0WAIT_B0<1 0FREE_F0>1 0B0 0F1 0SEND_F1>1 0FREE_F1>1
        rank 1: 1POST_F0<0 1POST_F1<0 1WAIT_F0<0 1F0 1WAIT_F1<0 1F1 1B0 1SEND_B0>0 1FREE_B0>0
    """) == (
        "deadlock: "
        "rank 0 waits at 0WAIT_B0<1 for 1SEND_B0>0, which comes after 1WAIT_F1<0 of rank 1; "
        "rank 1 waits at 1WAIT_F1<0 for 0SEND_F1>1, which comes after 0WAIT_B0<1 of rank 0"
    )


def test_a_send_that_is_waited_for_before_anybody_receives_it_is_a_deadlock():
    """A transport with buffers would let this pass, until a tensor outgrows them."""
    assert refusal("""
        rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0FREE_F1>1 0FREE_F0>1 0POST_B0<1 0WAIT_B0<1 0B0
        rank 1: 1POST_F0<0 1WAIT_F0<0 1F0 1B0 1SEND_B0>0 1FREE_B0>0 1POST_F1<0 1WAIT_F1<0 1F1
    """) == (
        "deadlock: "
        "rank 0 waits at 0FREE_F1>1 for 1POST_F1<0, which comes after 1FREE_B0>0 of rank 1; "
        "rank 1 waits at 1FREE_B0>0 for 0POST_B0<1, which comes after 0FREE_F1>1 of rank 0"
    )


def test_a_rank_that_waits_outside_the_cycle_is_left_out_of_the_sentence():
    """Rank 0 waits for rank 1, which will not come: ranks 1 and 2 hold each other up."""
    assert refusal(
        """
        rank 0: 0POST_B0<1 0F0 0WAIT_B0<1 0B0
        rank 1: 1POST_B0<2 1F0 1F1 1SEND_F0>2 1WAIT_B0<2 1FREE_F0>2 1B0 1SEND_B0>0 1FREE_B0>0 \
                1SEND_F1>2 1FREE_F1>2
        rank 2: 2POST_F0<1 2POST_F1<1 2WAIT_F0<1 2F0 2WAIT_F1<1 2F1 2B0 2SEND_B0>1 2FREE_B0>1
    """.replace("\\\n", "")
    ) == (
        "deadlock: "
        "rank 1 waits at 1WAIT_B0<2 for 2SEND_B0>1, which comes after 2WAIT_F1<1 of rank 2; "
        "rank 2 waits at 2WAIT_F1<1 for 1SEND_F1>2, which comes after 1WAIT_B0<2 of rank 1"
    )


def test_a_rank_may_wait_for_itself():
    """Stages 0 and 1 on one rank: a cycle of one."""
    sentence = refusal("""
        rank 0: 1POST_F0<0 0F0 1WAIT_F0<0 0SEND_F0>1 0FREE_F0>1 1F0
    """)
    assert sentence == (
        "deadlock: rank 0 waits at 1WAIT_F0<0 for 0SEND_F0>1, which comes later on that rank"
    )
    assert refusal("rank 0: 0F0 0SEND_F0>1 0FREE_F0>1 1POST_F0<0 1WAIT_F0<0 1F0") == (
        "deadlock: rank 0 waits at 0FREE_F0>1 for 1POST_F0<0, which comes later on that rank"
    )


def test_a_receive_that_is_posted_when_it_is_needed_is_too_late_for_a_source_that_waits():
    """Window 0, and no send under way beyond the next instruction: both wait in their FREE."""
    assert refusal("""
        rank 0: 0F0 0SEND_F0>1 0FREE_F0>1 0F1 0SEND_F1>1 0FREE_F1>1 0POST_B0<1 0WAIT_B0<1 0B0
        rank 1: 1POST_F0<0 1WAIT_F0<0 1F0 1B0 1SEND_B0>0 1FREE_B0>0 1POST_F1<0 1WAIT_F1<0 1F1
    """) == (
        "deadlock: "
        "rank 0 waits at 0FREE_F1>1 for 1POST_F1<0, which comes after 1FREE_B0>0 of rank 1; "
        "rank 1 waits at 1FREE_B0>0 for 0POST_B0<1, which comes after 0FREE_F1>1 of rank 0"
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_everything_that_is_generated_runs(name):
    """All windows alike and all windows at random, on random skip connections."""
    rng = random.Random(0)
    for ranks in range(1, 6):
        for m in (1, 2, 3, 5, 8):
            programs = compute(name, ranks, m)
            stages = len(holders(programs))
            for ahead in range(1, 5):
                check(insert(programs, random_skips(stages, rng), [ahead] * (stages - 1)))
            windows = [rng.randint(1, 4) for _ in range(stages - 1)]
            check(insert(programs, random_skips(stages, rng), windows))


def test_a_skip_connection_over_many_stages():
    """With at most two sends under way on every channel, ten stages held each other up for good.

    Stage 0 would not send activation 8 to stage 9 before activation 6 was received, nor stage 9
    gradient 2 before gradient 0 was: the bound has to grow with the distance.
    """
    check(insert(one_f_one_b(10, 10), [*chain(10), Edge(0, 9, gradient=True)], [2] * 9))


def test_evaluations_run():
    for holder in ([0], [0, 1, 2], [0, 1, 0, 1], [0, 1, 1, 0]):
        programs = forward_only(holder, 5)
        check(insert(programs, chain(len(holder)), [2] * (len(holder) - 1)))


# Lanes that several channels share.


def lanes_by(layout, programs):
    """Between ranks: what a channel's lane depends on."""
    holder = holders(programs)

    def lane(channel):
        ends = holder[channel.source], holder[channel.target]
        return {
            "one": 0,
            "pair": frozenset(ends),
            "pair, direction": ends,
            "pair, direction, flow": (*ends, channel.flow),
        }[layout]

    return lane


def survivors(name, layout, windows=(1, 2, 3, 4, 8, 64)):
    """The windows with which a schedule is free of deadlock on shared lanes."""
    found = []
    for ahead in windows:
        for ranks, m in ((2, 4), (4, 8)):
            programs = compute(name, ranks, m)
            stages = len(holders(programs))
            full = insert(programs, chain(stages), [ahead] * (stages - 1))
            check(full)  # each channel a lane of its own: always
            try:
                check(full, lanes_by(layout, programs))
            except ScheduleError as error:
                assert error.message.startswith("deadlock: ")
                break
        else:
            found.append(ahead)
    return found


ALL = [1, 2, 3, 4, 8, 64]


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_lane_for_both_directions_is_a_deadlock_whatever_the_window(name):
    """One communicator for everything, or for each pair of ranks: torch's, unless it batches."""
    assert survivors(name, "one") == survivors(name, "pair") == []


@pytest.mark.parametrize(
    ("name", "by_direction", "by_flow"),
    [
        ("naive", ALL, ALL),
        ("gpipe", ALL, ALL),
        ("1f1b", ALL, ALL),
        ("eager-1f1b", ALL, ALL),
        ("zb-h1", ALL, ALL),
        # In a V one chunk's activations and the other's gradients go the same way.
        ("zb-v", [], ALL),
        # Chunks are sent in an order that windows of their own do not keep: only if all are posted.
        ("interleaved", [4, 8, 64], [4, 8, 64]),
    ],
)
def test_lanes_of_one_direction(name, by_direction, by_flow):
    assert survivors(name, "pair, direction") == by_direction
    assert survivors(name, "pair, direction, flow") == by_flow


def test_a_cycle_through_a_lane_is_told_by_who_is_before_whom():
    programs = insert(one_f_one_b(2, 1), chain(2), [1])
    assert refusal(format_programs(programs), lanes_by("pair", programs)) == (
        "deadlock: "
        "rank 1 waits at 1WAIT_F0<0 for 0POST_B0<1, which is before 0SEND_F0>1 in a lane of rank 0"
        "; 0POST_B0<1 waits for 1SEND_B0>0, which comes after 1WAIT_F0<0 of rank 1"
    )


def test_transfers_in_opposite_orders_on_the_two_ends_of_a_lane():
    """No rank has to wait for this to be a deadlock: each transfer is behind the other."""
    text = """
        rank 0: 0F0 0F1 0SEND_F0>1 2F0 2SEND_F0>3 0FREE_F0>1 2FREE_F0>3
        rank 1: 3POST_F0<2 1POST_F0<0 1WAIT_F0<0 1F0 3WAIT_F0<2 3F0
    """
    check(parse_programs(text))
    assert refusal(text, lambda channel: channel.flow is Flow.ACTIVATION) == (
        "deadlock: "
        "3POST_F0<2 waits for 0SEND_F0>1, which is before 2SEND_F0>3 in a lane of rank 0; "
        "0SEND_F0>1 waits for 3POST_F0<2, which is before 1POST_F0<0 in a lane of rank 1"
    )
