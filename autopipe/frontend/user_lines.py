"""Find the line of the user's own code (`model.py:31`) at which something happened; turn errors
there into errors that name it; and list the code objects of a function."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from autopipe.errors import AutopipeError, ModelError

_OURS = str(Path(__file__).parents[1]) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")


@cache
def _library_folders() -> tuple[str, ...]:
    """The folders of torch, and of the programs that call autopipe. None of them is imported: the
    command line starts without torch."""
    found = map(importlib.util.find_spec, ("torch", "typer", "click"))  # some typers have no click
    return tuple(str(Path(s.origin).parent) + os.sep for s in found if s is not None and s.origin)


@cache
def _is_users(filename: str) -> bool:
    """Whether a file belongs neither to torch nor to autopipe nor to libraries below them."""
    if filename.startswith("<") or (filename.startswith(_PYTHON) and not _is_installed(filename)):
        return False
    return not filename.startswith((*_library_folders(), _OURS))


def _is_installed(filename: str) -> bool:
    return _INSTALLED.search(filename) is not None


def is_own_code(filename: str) -> bool:
    """Whether a file is the user's own, and not of an installed library.

    Args:
        filename: as a warning names it; `sys` stands for a place above all Python frames.
    """
    return filename != "sys" and _is_users(filename) and not _is_installed(filename)


def here(*, alone: bool = False, within: FrameType | None = None) -> str:
    """`file:line` of the user's code that is running now; empty if there is none.

    Args:
        alone: without the user's line that has called a library, if the code is a library's.
        within: the frame that has called the code; None: it is any on the stack.
    """
    stack = traceback.walk_stack(inspect.currentframe())  # without the text of each line
    called = takewhile(lambda entry: entry[0] is not within, stack)
    running = ((frame.f_code.co_filename, line) for frame, line in called)
    place = next((f"{file}:{line}" for file, line in running if _is_users(file)), "")
    return place if alone or not place else place + _called_at(traceback.extract_stack())


def running(thread: int) -> str:
    """`model.py:31`, the line of the user's code that a thread runs for autopipe; else empty.

    Args:
        thread: its `threading.get_ident()`.
    """
    innermost = sys._current_frames().get(thread)  # public, in spite of its name
    found = ""
    for frame, line in traceback.walk_stack(innermost) if innermost is not None else ():
        file = frame.f_code.co_filename
        if found and file.startswith(_OURS):
            return found
        if not found and _is_users(file):
            found = f"{Path(file).name}:{line}"
    return ""  # the program that has called autopipe at most


def begins(function: object) -> str:
    """`file:line` where a user's function begins; empty for an object without code."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def root(error: BaseException) -> BaseException:
    """The innermost of a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def of_error(error: BaseException) -> str:
    """The innermost user's line that an exception passed through, with its source text."""
    passed = traceback.extract_tb(error.__traceback__)
    frames = [f for f in passed if _is_users(f.filename)]
    return _with_text(frames[-1]) + _called_at(passed) if frames else ""


def _with_text(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}" + (f" `{frame.line}`" if frame.line else "")


def _called_at(frames: Iterable[traceback.FrameSummary]) -> str:
    """`, called at model.py:12 `x = self.net(x)``: the user's line that has called the library of
    the innermost frame; empty if that frame is in no library, or no user's line has called it.
    """
    caller: traceback.FrameSummary | None = None
    calling, library = True, False
    for frame in frames:
        if frame.filename.startswith(_OURS):
            calling = True
        elif _is_users(frame.filename):
            library = _is_installed(frame.filename)
            if calling or not library:
                caller = None if library else frame
            calling = False
    return f", called at {_with_text(caller)}" if caller is not None and library else ""


def of_trace(stack_trace: str | None) -> str:
    """The user's line in the stack trace that torch.export stored on a node."""
    found = _FRAME.finditer(stack_trace or "")
    users = [f"{m['file']}:{m['line']}" for m in found if _is_users(m["file"])]
    return users[-1] if users else ""


_SIGNATURES = {
    "model": "model()",
    "inputs": "inputs(batch_size)",
    "batches": "batches(batch_size), or batches(batch_size, shard, num_shards)",
    "optimizer": "optimizer(parameters)",
    "scheduler": "scheduler(optimizer)",
}
"""How autopipe calls the functions of a model file."""


@contextmanager
def as_model_errors(what: str) -> Iterator[None]:
    """Within, an error of the user's code becomes a `ModelError` of one sentence."""
    try:
        yield
    except AutopipeError:
        raise
    except SystemExit as error:
        place = of_error(error)
        raise ModelError(
            f"{place + ': ' if place else ''}{what}() ends the program (exit code {error.code})",
            hint=_NO_OPTIONS
            if _reads_options(error)
            else "let it raise an error that says what is missing",
        ) from error
    except Exception as error:  # the user's code may raise anything
        place, name = of_error(error), what.rpartition(" ")[2]
        hint = f"does {name}() go well by itself? --debug shows all calls"
        if isinstance(error, TypeError) and not place and name in _SIGNATURES:  # it has not begun
            hint = f"it is called as {_SIGNATURES[name]}"
        raise ModelError(
            f"{place + ': ' if place else ''}{what}() raised {type(error).__name__}: {error}",
            hint=hint,
        ) from error


def run_module(action: Callable[[], Any], what: str) -> Any:
    """The result of an action that runs a user's file as a module.

    Raises:
        ModelError: the file cannot be run; names its line.
    """
    try:
        return action()
    except SyntaxError as error:
        if "null bytes" in str(error.msg):
            raise ModelError(
                f"{error.filename or what}: {error.msg}",
                hint="is it Python source in UTF-8, and was it copied whole?",
            ) from error
        place = ":".join(str(part) for part in (error.filename or what, error.lineno) if part)
        raise ModelError(
            f"{place}: {error.msg}", hint=f"python -m py_compile {what} shows where"
        ) from error
    except SystemExit as error:
        raise ModelError(
            f"{of_error(error)}: "
            f"{what} ends the program (exit code {error.code}) when it "
            "is imported",
            hint=_NO_OPTIONS
            if _reads_options(error)
            else 'put what it does as a program under `if __name__ == "__main__":`',
        ) from error
    except Exception as error:  # the user's code may raise anything
        place = of_error(error)
        raise ModelError(
            f"{place or what}: {what} cannot be run: {type(error).__name__}: {error}",
            hint=_of_import(error, what) or "does it go well by itself? --debug shows all calls",
        ) from error
    finally:
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_default_device(None)  # that of a file which trains by itself


_NO_OPTIONS = (
    "a model file is run without options: give each a default, or read it from the environment"
)


def _reads_options(error: SystemExit) -> bool:
    """Whether a program ends since a parser of its own found its options wrong."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(Path(frame.f_code.co_filename).name == "argparse.py" for frame, _ in frames)


def _of_import(error: Exception, what: str) -> str | None:
    """The hint for an import that Python does not find, and for a question that nobody answers."""
    if isinstance(error, EOFError):
        return "a model file asks nobody: read what it needs from a file or the environment"
    if isinstance(error, ImportError) and "no known parent package" in str(error):
        return (
            f"a file stands by itself; as a module of its package: PACKAGE.{Path(what).stem}:model"
        )
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    return (
        f"install what has {error.name} beside autopipe, or name its folder: PYTHONPATH=FOLDER "
        "autopipe ..."
    )


def codes_in(code: object) -> Iterator[CodeType]:
    """The code of a function and of functions inside it; nothing for anything but code."""
    if isinstance(code, CodeType):
        yield code
        for inner in code.co_consts:
            yield from codes_in(inner)
