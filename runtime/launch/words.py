"""Tells a rank's own error from an echo: the error of a connection to a rank that has died."""

from __future__ import annotations

import re

_ECHO = re.compile(
    "Connection closed by peer|Connection reset by peer|Broken pipe|pair closure|Timed out waiting"
    "|remote process exited|NCCL communicator was aborted|timed out after .* waiting",
    re.IGNORECASE,
)
"""Messages of gloo and NCCL when a peer is gone or takes too long."""


def is_echo(error: BaseException) -> bool:
    """Whether an error only shows that another rank is gone or late."""
    known: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in known:
        known.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(
        isinstance(error, RuntimeError) and _ECHO.search(str(error))
        or any(kind.__name__ == "DistError" for kind in type(error).__mro__)  # torch's
        for error in known
    )  # fmt: skip


_IN_MODEL = "in the model at "


def place(error: BaseException, line: str) -> None:
    """Note the line of the user's model, `model.py:12`, whose op has raised an error."""
    error.add_note(f"{_IN_MODEL}{line}")


def sentence(error: BaseException) -> str:
    """An error in one line: `IndexError: index out of range, in the model at model.py:12`.

    It has the first line of the error's message, and the model's line if `place` has noted one.
    """
    first = next(iter(str(error).strip().splitlines()), "")
    notes: list[str] = getattr(error, "__notes__", [])
    where = next((note for note in notes if note.startswith(_IN_MODEL)), "")
    said = f"{first.removesuffix('.')}, {where}" if where else first
    return f"{type(error).__name__}: {said}"
