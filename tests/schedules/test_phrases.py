"""Instructions in words: the sentence of a verdict, and the few of a slice in a trace."""

import pytest

from autopipe.schedules.instructions import Kind, parse
from autopipe.schedules.phrases import describe, short


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        ("1F5", "forward of micro-batch 5"),
        ("1B5", "backward of micro-batch 5"),
        ("1I5", "backward for the inputs of micro-batch 5"),
        ("1W5", "backward for the weights of micro-batch 5"),
        ("1POST_F5<0", "making room for the activations of micro-batch 5 from stage 0"),
        ("1WAIT_F5<0", "waiting for the activations of micro-batch 5 from stage 0"),
        ("1SEND_B5>0", "sending the gradients of micro-batch 5 to stage 0"),
        ("1FREE_F5>2", "waiting for stage 2 to take the activations of micro-batch 5"),
        ("1REDUCE", "about to sum its gradients over the ranks"),
        ("1STEP", "waiting for the sums of its gradients"),
    ],
)
def test_what_a_rank_is_doing(instruction: str, words: str) -> None:
    assert describe(parse(instruction)) == words


def test_every_kind_has_words() -> None:
    texts = ("1F5 1B5 1I5 1W5 1POST_F5<0 1WAIT_F5<0 1SEND_B5>0 1FREE_F5>2 1REDUCE 1STEP").split()
    assert {parse(text).kind for text in texts} == set(Kind)


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        ("1F5", "forward 5"),
        ("1B5", "backward 5"),
        ("1I5", "backward for inputs 5"),
        ("1W5", "backward for weights 5"),
        ("1POST_F5<0", "make room for activations 5"),
        ("1WAIT_F5<0", "wait for activations 5"),
        ("1SEND_B5>0", "send gradients 5"),
        ("1FREE_F5>2", "wait until activations 5 are taken"),
        ("1REDUCE", "sum of gradients, stage 1"),
        ("1STEP", "wait for sums of gradients"),
    ],
)
def test_where_there_is_little_room(instruction: str, words: str) -> None:
    assert short(parse(instruction)) == words
