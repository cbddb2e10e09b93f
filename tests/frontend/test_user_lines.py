"""Errors name the user's own line, whichever frames of libraries lie above it."""

import contextlib
import importlib
from pathlib import Path

import pytest
import torch
import typer.main

from autopipe.errors import ModelError
from autopipe.frontend import user_lines

TORCH = torch.nn.functional.__file__


def test_the_line_that_runs_now():
    assert user_lines.here() == f"{__file__}:18"


def test_the_line_an_exception_came_through_with_its_text():
    try:
        torch.nn.Linear(3, 3)(torch.ones(4))  # raises deep inside torch
    except RuntimeError as error:
        found = user_lines.of_error(error)
    assert found == (
        f"{__file__}:23 `torch.nn.Linear(3, 3)(torch.ones(4))  # raises deep inside torch`"
    )


def test_the_line_that_called_into_a_library(tmp_path, monkeypatch):
    """Bug: of a model that calls timm or transformers only their own lines were told, in files that
    the user has never seen."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "bought.py").write_text(
        "from autopipe.frontend import user_lines\n"
        "def here(): return user_lines.here()\n"
        "def alone(): return user_lines.here(alone=True)\n"
        "def fails(): raise ValueError\n"
    )
    monkeypatch.syspath_prepend(folder)
    bought = importlib.import_module("bought")
    line = user_lines.here().rpartition(":")[2]
    assert bought.here() == (
        f"{folder}/bought.py:2, called at {__file__}:{int(line) + 1} `assert bought.here() == (`"
    )
    assert bought.alone() == f"{folder}/bought.py:3"
    with pytest.raises(ValueError) as raised:
        bought.fails()
    assert user_lines.of_error(raised.value) == (
        f"{folder}/bought.py:4 `def fails(): raise ValueError`, called at "
        f"{__file__}:{int(line) + 6} `bought.fails()`"
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
    assert user_lines.of_trace(trace) == "/home/me/model.py:31"


def test_no_line_of_the_users():
    assert user_lines.of_trace(None) == ""
    assert user_lines.of_trace(f'  File "{TORCH}", line 1, in relu') == ""
    assert user_lines.of_trace(f'  File "{user_lines.__file__}", line 1, in here') == ""
    called = f'  File "{typer.main.__file__}", line 1, in wrapper'
    assert user_lines.of_trace(called) == "", "it calls autopipe's commands; nobody's model does"


def test_whose_a_file_is():
    """A folder may be called nearly as Python calls that of installed packages."""
    own = ["/home/me/model.py", "model.py", "/home/me/our-packages/model.py"]
    others = [TORCH, contextlib.__file__, user_lines.__file__, typer.main.__file__]
    others += ["<string>", "sys"]
    others += [f"/home/me/.venv/lib/python3.11/{kind}-packages/a/b.py" for kind in ("site", "dist")]
    assert [user_lines.is_own_code(name) for name in own] == [True] * len(own)
    assert [user_lines.is_own_code(name) for name in others] == [False] * len(others)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (b"import torch\0\n", "^{path}: source code .*null bytes\nhint: is it Python source"),
        (b"import torch\n(\n", r"^{path}:2: '\(' was never closed"),
    ],
)
def test_a_file_that_is_no_python(source: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_bytes(source)
    with pytest.raises(ModelError, match=sentence.format(path=path)):
        user_lines.run_module(lambda: compile(path.read_bytes(), str(path), "exec"), str(path))
