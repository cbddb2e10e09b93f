"""Convert frozen dataclasses to JSON and back, by their annotations alone.

    value  --to_json-->  data  --dumps-->  text  --save-->  file
    value  <-from_json-  data  <-------------load---------  file

An annotation is one of

    T = bool | int | float | str | None      an int is taken where a float is asked, a bool never
      | tuple[T, ...]                        a JSON list
      | dict[str, T]                         an object, keys sorted: equal values are equal bytes
      | a dataclass                          an object, its fields in order
      | T | T                                scalars, or one T and None

A value that is written and read is equal: floats are written as `repr` writes them, NaN and
infinities are refused. Every error names the path of the value: `plan.stages[1].first: expected a
string, found 7`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import inspect
import math
import re
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from autopipe.errors import PlanError
from autopipe.util import atomic_file, json_text
from autopipe.util.json_text import Json

T = TypeVar("T")

# The scalars, each with its name in JSON Schema and in a sentence.
_SCALARS: dict[Any, tuple[str, str]] = {
    bool: ("boolean", "true or false"),
    int: ("integer", "an integer"),
    float: ("number", "a finite number"),
    str: ("string", "a string"),
    type(None): ("null", "null"),
}


def to_json(value: object, path: str = "value") -> Json:
    """Convert the dataclass `value` to JSON data; errors call it `path`.

    Raises:
        PlanError: a field's value does not fit its annotation, or is a number that is not finite.
    """
    return _encode(type(value), value, path)


def from_json(cls: type[T], data: object, path: str) -> T:
    """Make a `cls` from `data`, parsed JSON; fields with a default may be missing.

    Raises:
        PlanError: an unknown or missing field, or a wrong type, by its path under `path`.
    """
    return typing.cast(T, _decode(cls, data, path))


def dumps(value: object) -> str:
    """The JSON text for the dataclass `value`, ended by a newline; equal values give equal text."""
    return json_text.layout(to_json(value))


def digest(value: object) -> str:
    """Eight hex digits; two different dataclasses share them once in four billion."""
    return hashlib.blake2b(dumps(value).encode(), digest_size=4).hexdigest()


def save(value: object, path: Path) -> None:
    """Write `value` to a temporary file, flush it to disk and rename it to `path`.

    Raises:
        PlanError: as `to_json`.
        AutopipeError: the file cannot be written; no temporary file is left.
    """
    atomic_file.write(dumps(value), path)


def load(cls: type[T], path: Path, *, root: str, format: int | None = None) -> T:
    """Read a `cls` from the file at `path`; errors call the whole of it `root`.

    With `format`, the field `format` must have this value; it is checked before all others.

    Raises:
        PlanError: the file is missing, truncated, no JSON or of another format; or as `from_json`.
    """
    data = json_text.parse(path, root)
    if format is not None:
        _check_format(data, root, format)
    return from_json(cls, data, root)


def schema(cls: type, title: str) -> dict[str, Json]:
    """The JSON Schema (2020-12) of `cls`; the docstrings of the classes are its descriptions."""
    definitions: dict[str, Json] = {}
    top = _describe_class(cls, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **top,
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }


# --- Values --------------------------------------------------------------------------------------


def _encode(hint: Any, value: object, path: str) -> Json:
    if dataclasses.is_dataclass(hint):
        if type(value) is not hint:
            raise _mismatch(hint, value, path)
        return {
            name: _encode(of, getattr(value, name), f"{path}.{name}")
            for name, of in _fields(hint).items()
        }
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if not isinstance(value, tuple):
            raise _mismatch(hint, value, path)
        return [_encode(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        items = _entries(hint, value, path)
        return {key: _encode(arguments[1], items[key], f"{path}.{key}") for key in sorted(items)}
    if (inner := _optional(hint)) is not None:
        return None if value is None else _encode(inner, value, path)
    return _scalar(hint, value, path)


def _decode(hint: Any, data: object, path: str) -> object:
    if dataclasses.is_dataclass(hint):
        return _decode_class(hint, data, path)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if not isinstance(data, list):
            raise _mismatch(hint, data, path)
        return tuple(_decode(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if origin is dict:
        items = _entries(hint, data, path)
        return {key: _decode(arguments[1], item, f"{path}.{key}") for key, item in items.items()}
    if (inner := _optional(hint)) is not None:
        return None if data is None else _decode(inner, data, path)
    return _scalar(hint, data, path)


def _decode_class(cls: Any, data: object, path: str) -> object:
    hints, items = _fields(cls), _entries(cls, data, path)
    for name in items:
        if name not in hints:
            close = difflib.get_close_matches(name, hints, n=1)
            raise PlanError(
                f"{path}.{name}: unknown field; {cls.__name__} has {', '.join(hints)}",
                hint=f"did you mean {close[0]}?" if close else None,
            )
    required = _required(cls)
    for name, hint in hints.items():
        if name in required and name not in items:
            raise PlanError(f"{path}.{name}: missing; expected {_phrase(hint)}")
    return cls(**{name: _decode(hints[name], items[name], f"{path}.{name}") for name in items})


def _entries(hint: Any, value: object, path: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _mismatch(hint, value, path)
    for key in value:
        if type(key) is not str:
            raise PlanError(f"{path}: expected keys that are strings, found {json_text.show(key)}")
        _check_text(key, f"{path}: a key")
    return value


def _scalar(hint: Any, value: object, path: str) -> Json:
    kinds = _kinds(hint)
    if isinstance(value, str):
        value = str.__str__(value)  # `torch.__version__` is a subclass of str.
        _check_text(value, path)
    kind: type = type(value)
    if kind is int and int not in kinds and float in kinds:
        kind, value = float, _as_float(typing.cast(int, value))
    if kind not in kinds or (isinstance(value, float) and not math.isfinite(value)):
        raise _mismatch(hint, value, path)
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise PlanError(f"{path}: expected an integer below 10^30, found {json_text.show(value)}")
    return typing.cast(Json, value)


_LARGEST = 10**30
"""Beyond any number of bytes or operations; integers need to become floats."""

_NO_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that a terminal obeys, and halves of such as no file can hold."""


def _check_text(text: str, path: str) -> None:
    if (found := _NO_TEXT.search(text)) is not None:
        raise PlanError(
            f"{path}: expected text that can be printed, found {json_text.show(found[0])} in it"
        )


def _as_float(number: int) -> float:
    """`number` as the nearest float; infinity where there is none."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _mismatch(hint: Any, value: object, path: str) -> PlanError:
    return PlanError(f"{path}: expected {_phrase(hint)}, found {json_text.show(value)}")


# --- Annotations ---------------------------------------------------------------------------------


@functools.cache
def _fields(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def _required(cls: type) -> tuple[str, ...]:
    return tuple(
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The scalar types of `hint`, one or a union."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if any(kind not in _SCALARS for kind in kinds):
        raise TypeError(f"no JSON form for the annotation {hint}")
    return kinds


def _optional(hint: Any) -> Any:
    """T where `hint` is `T | None` and T is no scalar; else None."""
    if not isinstance(hint, types.UnionType):
        return None
    inner = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return inner[0] if len(inner) == 1 and inner[0] not in _SCALARS else None


def _phrase(hint: Any) -> str:
    """The values that `hint` allows, in words."""
    if dataclasses.is_dataclass(hint):
        return f"an object ({typing.cast(type, hint).__name__})"
    if typing.get_origin(hint) is tuple:
        return "a list"
    if typing.get_origin(hint) is dict:
        return "an object"
    if (inner := _optional(hint)) is not None:
        return f"{_phrase(inner)} or null"
    return " or ".join(_SCALARS[kind][1] for kind in _kinds(hint))


# --- Files ---------------------------------------------------------------------------------------


def _check_format(data: dict[str, object], root: str, format: int) -> None:
    found = data.get("format")
    if "format" not in data:
        raise PlanError(
            f"{root}.format: missing; this autopipe reads format {format}",
            hint=f"is this file a {root}?",
        )
    if type(found) is not int:
        raise PlanError(f"{root}.format: expected an integer, found {json_text.show(found)}")
    if found != format:
        raise PlanError(
            f"{root}.format: this autopipe reads format {format}, the file is format {found}",
            hint=f"make the {root} again with `autopipe {root}`",
        )


# --- Schema --------------------------------------------------------------------------------------


def _describe_class(cls: type, definitions: dict[str, Json]) -> dict[str, Json]:
    return {
        "description": inspect.getdoc(cls) or "",
        "type": "object",
        "properties": {name: _describe(of, definitions) for name, of in _fields(cls).items()},
        "required": list(_required(cls)),
        "additionalProperties": False,
    }


def _describe(hint: Any, definitions: dict[str, Json]) -> Json:
    if dataclasses.is_dataclass(hint):
        name = typing.cast(type, hint).__name__
        if name not in definitions:
            definitions[name] = None  # Entered before its fields, which may name it again.
            definitions[name] = _describe_class(typing.cast(type, hint), definitions)
        return {"$ref": f"#/$defs/{name}"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return {"type": "array", "items": _describe(arguments[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _describe(arguments[1], definitions)}
    if (inner := _optional(hint)) is not None:
        return {"anyOf": [_describe(inner, definitions), {"type": "null"}]}
    names: list[Json] = [_SCALARS[kind][0] for kind in _kinds(hint)]
    return {"type": names[0] if len(names) == 1 else names}
