"""The user's line, whatever stands between it and us."""

import contextlib

import torch

from autopipe import places

TORCH = torch.nn.functional.__file__


def test_the_line_that_runs_now():
    assert places.here() == f"{__file__}:13"


def test_the_line_an_exception_came_through_with_its_text():
    try:
        torch.nn.Linear(3, 3)(torch.ones(4))  # raises deep inside torch
    except RuntimeError as error:
        found = places.of_error(error)
    assert found == (
        f"{__file__}:18 `torch.nn.Linear(3, 3)(torch.ones(4))  # raises deep inside torch`"
    )


def test_the_innermost_of_the_users_lines_in_a_trace():
    trace = f"""
  File "/home/me/train.py", line 3, in main
    model(x)
  File "/home/me/model.py", line 31, in forward
    x = F.relu(x)
  File "{TORCH}", line 1500, in relu
    return torch.relu(input)
  File "{contextlib.__file__}", line 80, in inner
  File "<string>", line 1, in <module>
"""
    assert places.of_trace(trace) == "/home/me/model.py:31"


def test_no_line_of_the_users():
    assert places.of_trace(None) == ""
    assert places.of_trace(f'  File "{TORCH}", line 1, in relu') == ""
    assert places.of_trace(f'  File "{places.__file__}", line 1, in here') == ""
