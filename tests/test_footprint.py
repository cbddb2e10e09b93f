"""The fullest moment of a program, worked by hand on two drawn stages."""

from autopipe.footprint import Sizes, footprint
from autopipe.schedule import Flow, gpipe, one_f_one_b, parse_programs
from autopipe.transfers import Edge, insert

F, B = Flow.ACTIVATION, Flow.GRADIENT

# Stage 0 keeps 100 bytes of each micro-batch and sends x (10 bytes) to stage 1, which keeps 60;
# the gradient of x, 10 bytes too, comes back.
FIRST = Sizes(kept=100, arriving={(B, 1): {"x": 10}}, leaving={(F, 1): {"x": 10}})
LAST = Sizes(kept=60, arriving={(F, 0): {"x": 10}}, leaving={(B, 0): {"x": 10}})


def program(text):
    (only,) = parse_programs("rank 0: " + " ".join(text.split()))
    return only


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
