"""The fullest moment of a program, worked by hand on two drawn stages."""

from collections import Counter

from autopipe.schedules.generators import gpipe, one_f_one_b
from autopipe.schedules.instructions import Flow, parse_programs
from autopipe.schedules.peak_memory import Sizes, fullest_moment
from autopipe.schedules.transfers import Edge, insert

F, B = Flow.ACTIVATION, Flow.GRADIENT

# Stage 0 keeps 100 bytes of each micro-batch and sends x (10 bytes) to stage 1, which keeps 60;
# the gradient of x, 10 bytes too, comes back.
FIRST = Sizes(kept=100, arriving={(B, 1): {"x": 10}}, leaving={(F, 1): {"x": 10}})
LAST = Sizes(kept=60, arriving={(F, 0): {"x": 10}}, leaving={(B, 0): {"x": 10}})


def program(text):
    (only,) = parse_programs("rank 0: " + " ".join(text.split()))
    return only


def footprint(program, sizes):
    """What a rank with one stage holds at its fullest moment, by kind alone."""
    held = fullest_moment(program, {program[0].stage: sizes}).held
    return Counter({kind: n for (_, kind), n in held.items()})


def test_the_first_stage_of_two():
    """
                  activations  transfers
    POST_B0                           10   buffer of the gradient
    F0                    100         20   + kept, + x on its way out
    SEND_F0
    F1                    200         30   + kept, + x of micro-batch 1     <- the fullest
    FREE_F0               200         20   (after it)
    WAIT_B0               200         20   the buffer is the gradient now
    B0                    100         10   (after it)
    """
    found = footprint(
        program("""
            0POST_B0<1 0F0 0SEND_F0>1 0F1 0FREE_F0>1 0SEND_F1>1 0FREE_F1>1
            0WAIT_B0<1 0POST_B1<1 0B0 0WAIT_B1<1 0B1
        """),
        FIRST,
    )
    assert found == {"activations": 200, "transfers": 30}


def test_the_last_stage_of_two():
    """
                  activations  transfers
    POST_F0                           10
    WAIT_F0                10          0   the buffer is what the stage computes with
    POST_F1                10         10
    F0                     70         10
    B0                     70         20   + the gradient that leaves         <- the fullest
                            0         20   (after it: what was kept and had arrived)
    """
    found = footprint(
        program("""
            0POST_F0<0 0WAIT_F0<0 0POST_F1<0 0F0 0B0 0SEND_B0>0
            0WAIT_F1<0 0F1 0FREE_B0>0 0B1 0SEND_B1>0 0FREE_B1>0
        """),
        LAST,
    )
    # Later F1 and B1 run while B0's gradient is still on its way: 70 + 10, then 70 + 10.
    assert found == {"activations": 70, "transfers": 20}


def test_gpipe_holds_every_micro_batch_and_1f1b_only_those_in_flight():
    edges = [Edge(0, 1, gradient=True)]
    for generate, flying in ((gpipe, (6, 6)), (one_f_one_b, (2, 1))):
        programs = insert(generate(2, 6), edges, [2])
        first, last = (footprint(p, s) for p, s in zip(programs, (FIRST, LAST), strict=True))
        assert first["activations"] == 100 * flying[0]
        assert last["activations"] == 70 * flying[1]


def test_one_tensor_for_two_stages_leaves_once_and_its_gradients_are_added_in_place():
    skip = Sizes(
        kept=0,
        arriving={(B, 1): {"x": 10}, (B, 2): {"x": 10}},
        leaving={(F, 1): {"x": 10}, (F, 2): {"x": 10}},
    )
    forward = program("0F0 0SEND_F0>1 0SEND_F0>2 0FREE_F0>1 0FREE_F0>2 0F1")
    assert footprint(forward, skip) == {"activations": 0, "transfers": 20 - 10}
    # One buffer is freed when it is added to the other: never more than two.
    backward = program("0POST_B0<2 0POST_B0<1 0WAIT_B0<2 0WAIT_B0<1 0B0 0POST_B1<2 0POST_B1<1")
    assert footprint(backward, skip)["transfers"] == 20


def test_a_tensor_stays_until_the_last_of_its_sends_is_through():
    skip = Sizes(kept=0, arriving={}, leaving={(F, 1): {"x": 10}, (F, 2): {"x": 10}})
    one_send_open = program("0F0 0SEND_F0>1 0SEND_F0>2 0FREE_F0>1 0F1 0FREE_F0>2")
    assert footprint(one_send_open, skip)["transfers"] == 20


def test_a_split_backward_lets_go_in_two_halves():
    """I makes 5 of what W needs, W needs 30 of the 100 that F kept, and what came and went besides.

                 activations   transfers
    POST_B0                           10
    F0                   100          20   kept, + x on its way out
    WAIT_B0              100          20
    I0                   105          20   + what I makes                      <- the fullest
                          35          10   (after it: FREE has let x go; 30 of F's and 5 of I's)
    W0                    35          10
                           0           0   (after it)
    """
    split = Sizes(
        kept=100, arriving={(B, 1): {"x": 10}}, leaving={(F, 1): {"x": 10}}, stash=35, fresh=5
    )
    first = program("0POST_B0<1 0F0 0SEND_F0>1 0WAIT_B0<1 0I0 0FREE_F0>1 0W0")
    assert footprint(first, split) == {"activations": 105, "transfers": 20}
    assert str(fullest_moment(first, {0: split}).at) == "0I0"
    # Of two micro-batches whose W comes late, the stash of one lies below the other's peak.
    two = program("0F0 0I0 0F1 0I1 0W0 0W1")
    alone = Sizes(kept=100, arriving={}, leaving={}, stash=35, fresh=5)
    assert +footprint(two, alone) == {"activations": 35 + 105}


def test_recomputation_is_a_moment_in_each_backward():
    again = Sizes(kept=10, arriving={}, leaving={}, made=60)
    assert +footprint(program("0F0 0F1 0B0 0B1"), again) == {"activations": 2 * 10 + 60}


def test_what_a_forward_lets_go_of_is_a_moment_in_it():
    """The second forward holds what the first one keeps, and its own branch besides."""
    branch = Sizes(kept=10, arriving={}, leaving={}, momentary=25)
    assert +footprint(program("0F0 0F1 0B0 0B1"), branch) == {"activations": 2 * 10 + 25}


def test_two_stages_on_one_rank_are_full_together():
    """Stage 0 keeps 100, stage 3 keeps 60; when stage 3 runs, stage 0 holds two micro-batches."""
    (rank,) = parse_programs("rank 0: 0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1")
    one, other = (Sizes(kept=size, arriving={}, leaving={}) for size in (100, 60))
    at, held = fullest_moment(rank, {0: one, 3: other})
    assert str(at) == "3F0"
    assert +held == {
        (0, "activations"): 200,
        (3, "activations"): 60,
    }
