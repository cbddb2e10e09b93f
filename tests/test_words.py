"""The sentences that a verdict is made of."""

import pytest
import torch.distributed as dist

from autopipe.runtime.words import describe, is_echo, sentence
from autopipe.schedule import Kind, parse


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


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


# As gloo says it (torch 2.13), to the neighbours of a rank that was killed, or is late.
CLOSED = RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:38217. GLHF")
LATE = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 300000ms for recv operation")


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (CLOSED, True),
        (LATE, True),
        (dist.DistNetworkError("the store is gone"), True),
        (chained(ValueError("stage 2, forward"), CLOSED), True),
        (chained(CLOSED, ZeroDivisionError()), True),
        (RuntimeError("shape '[2, 3]' is invalid for input of size 5"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # of the user's own data source
        (ZeroDivisionError(), False),
    ],
)
def test_errors_that_only_tell_of_another_rank(error: BaseException, echo: bool) -> None:
    assert is_echo(error) == echo


def test_the_first_line_of_an_error() -> None:
    assert sentence(ValueError("\nrows differ\n  3\n  4")) == "ValueError: rows differ"
    assert sentence(KeyError()) == "KeyError: "
