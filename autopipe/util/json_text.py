"""Read JSON text, with a plain error for each way it can be broken; write JSON for people.

file  --parse-->  data  --layout-->  text, in which what fits in 100 columns is on one line
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

from autopipe.errors import PlanError

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"

WIDTH = 100
"""Columns: an object or list that fits is written on one line."""


def layout(data: Json) -> str:
    """JSON text, ended by a newline; an object or list that fits in 100 columns is on one line."""
    return _lay_out(data, indent=0, used=0) + "\n"


def parse(path: Path, root: str) -> dict[str, object]:
    """Read the object in the JSON file at `path`; errors call it `root`.

    Raises:
        PlanError: the file is missing, truncated, no JSON, or holds no object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # an editor's byte order mark is no text
    except FileNotFoundError:
        raise PlanError(
            f"{path}: no such file, asked for the {root}", hint="check the path and the folder"
        ) from None
    except OSError as error:
        raise PlanError(
            f"{path}: the {root} cannot be read: {error.strerror}",
            hint="name the file itself, and see that you may read it",
        ) from error
    except UnicodeDecodeError as error:
        raise PlanError(
            f"{path}: expected the {root} as JSON text, found bytes that are no UTF-8 at "
            f"{error.start}",
            hint="is it another file?",
        ) from error
    if not text.strip():
        raise PlanError(f"{path}: the {root} is an empty file", hint="was it copied whole?")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise _broken(text, path, error) from None
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        what = "lists within lists without end" if deep else "a number of thousands of digits"
        raise PlanError(f"{path}: the {root} has {what}", hint="is it another file?") from None
    if not isinstance(data, dict):
        raise PlanError(
            f"{root}: expected an object, found {show(data)} in {path}", hint="is it another file?"
        )
    return data


def _broken(text: str, path: Path, error: json.JSONDecodeError) -> PlanError:
    place = f"{path}, line {error.lineno}, column {error.colno}"
    if error.msg == "Extra data":
        return PlanError(f"{place}: something stands behind the end", hint="take it out")
    body = text.strip()
    # A whole file is one object, so one that does not end in a brace has lost its end.
    if body.startswith("{") and (not body.endswith("}") or error.pos >= len(text.rstrip())):
        return PlanError(f"{place}: the file ends in the middle", hint="was it copied whole?")
    return PlanError(f"{place}: this is no JSON: {error.msg}", hint="is it another file?")


def show(value: object) -> str:
    """`value` as JSON text, shortened for a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _lay_out(data: Json, indent: int, used: int) -> str:
    """`data` after `used` columns of its line, of which `indent` are the indentation."""
    line = json.dumps(data, allow_nan=False)
    # One column is kept for the comma that may follow.
    if not isinstance(data, dict | list) or not data or used + len(line) < WIDTH:
        return line
    deeper = " " * (indent + 2)
    if isinstance(data, dict):
        parts = []
        for key, item in data.items():
            head = f"{deeper}{json.dumps(key)}: "
            parts.append(head + _lay_out(item, indent + 2, len(head)))
        opening, closing = "{", "}"
    else:
        parts = [deeper + _lay_out(item, indent + 2, indent + 2) for item in data]
        opening, closing = "[", "]"
    return f"{opening}\n" + ",\n".join(parts) + f"\n{' ' * indent}{closing}"
