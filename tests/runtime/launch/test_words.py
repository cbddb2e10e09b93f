"""The sentences of a verdict."""

import pytest
import torch.distributed as dist

from autopipe.runtime.launch.words import is_echo, place, sentence


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


def test_the_users_line_that_was_noted_stands_behind_it() -> None:
    error = IndexError("index out of range")
    place(error, "model.py:12")
    error.add_note("rank 1 failed")  # what others note is told elsewhere
    assert sentence(error) == "IndexError: index out of range, in the model at model.py:12"
    error = IndexError("Target 99 is out of bounds.")
    place(error, "model.py:12")
    assert sentence(error) == "IndexError: Target 99 is out of bounds, in the model at model.py:12"
