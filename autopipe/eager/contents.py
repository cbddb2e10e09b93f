"""Views of a value that a model keeps: its content, to put back, and its measure, to count; and of
a container its entries, live.

The content is what may change while the value stays the same object; the measure is a number (or
a tuple of numbers) that grows if the model counts with the value.

value               content                  measure
a list, a dict,
a set, a deque      its entries              the number of entries
an array            its values               its values
an iterator         how many it has given    how many it has given
a generator of
random numbers      its state                (none)
a tuple             (cannot change)          the measures of its entries
a text              (cannot change)          its length
a number            (cannot change)          the number
"""

from __future__ import annotations

import itertools
import operator
import sys
import warnings
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from autopipe.eager.iterators import Rewindable, place_of, put_at

MOST_ELEMENTS = 2**22
"""Elements of a tensor or an array up to which it is put back; larger ones are taken for data."""

MOST = 1_000
"""Entries of a container up to which they are looked at one by one."""

_NUMBERS = (int, float, Fraction, Decimal, timedelta)

_CONTAINERS = (list, dict, set, deque)
CONTAINERS = (*_CONTAINERS, OrderedDict, defaultdict, Counter)
"""Types of containers that run no code of a library's own."""


def content_of(value: Any) -> Any:
    """A value's content, to compare and to put back; None: it has none that can change."""
    if isinstance(value, _CONTAINERS):
        return _entries(value)
    if isinstance(value, bytearray | array):
        return bytes(value)
    if _is_array(value):
        return value.copy() if value.size <= MOST_ELEMENTS and value.flags.writeable else None
    return place_of(value)


def is_as(value: Any, content: Any) -> bool:
    """Whether a value's content equals an earlier one, as `content_of` gave it."""
    if content is None:
        return True
    if isinstance(value, _CONTAINERS):
        now = _entries(value)
        return len(now) == len(content) and all(map(operator.is_, now, content))
    if _is_array(value):
        return bool(value.shape == content.shape and value.tobytes() == content.tobytes())
    return bool(content_of(value) == content)


def put_back(value: Any, content: Any) -> None:
    """Give a value an earlier content, as `content_of` gave it."""
    if is_as(value, content):
        return
    if isinstance(value, list | bytearray):
        value[:] = content
    elif isinstance(value, array):
        del value[:]
        value.frombytes(content)
    elif isinstance(value, dict):
        kind = _kind_of(value)
        kind.clear(value)
        kind.update(value, zip(content[::2], content[1::2], strict=True))
    elif isinstance(value, set | deque):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(content)
    elif _is_array(value):
        value[...] = content
    else:
        put_at(value, content)


def measure(value: Any) -> Any:
    """A value's measure: a number, or a tuple of measures; None: no model counts with it."""
    if type(value) in _NUMBERS:  # a read of a trace is none of these
        return value
    if type(value) in CONTAINERS or type(value) is str:
        return len(value)
    if isinstance(value, array):
        return tuple(value) if value.typecode != "u" and len(value) <= MOST else None
    if isinstance(value, Rewindable):
        return len(value.values)
    if isinstance(value, tuple):
        items = tuple.__getitem__(value, slice(None))  # a class may have no length of its own
        return tuple(map(measure, items)) if len(items) <= MOST else None
    if (_is_array(value) and value.size <= MOST) or _is_number(value):
        return _nested(value.tolist()) if value.dtype.kind in "iuf" else None
    return None


def ahead(before: Any, rise: Any, calls: int) -> Any:
    """The measure after `calls` more calls, each of which raises it by `rise`."""
    if isinstance(rise, tuple):
        return tuple(ahead(b, r, calls) for b, r in zip(before, rise, strict=True))
    return before if rise is None else before + calls * rise


def rise_of(before: Any, after: Any) -> Any:
    """The difference of two measures of a value; None: it has no measure."""
    if isinstance(before, tuple) and isinstance(after, tuple):
        return tuple(map(rise_of, before, after)) if len(before) == len(after) else None
    if before is None or after is None or isinstance(before, tuple) or isinstance(after, tuple):
        return None
    return after - before


def raised(value: Any, to: Any) -> Any:
    """A value with the measure `to`: a container is extended in place, a number is a new one."""
    if isinstance(value, Rewindable):
        value.draw(min(to - len(value.values), MOST))
    elif isinstance(value, str):
        return value + value[-1:] * (to - len(value))
    elif isinstance(value, list | deque):
        items = [*value, *[*value][-1:] * (to - len(value))]
        value.clear()
        value.extend(items[:to])
    elif isinstance(value, dict):
        last = [*value.values()][-1] if value else None
        value.update(dict.fromkeys(_others(value, to), last))
    elif isinstance(value, set):
        value.update(_others(value, to))
    elif isinstance(value, tuple):
        items = [item if t is None else raised(item, t) for item, t in zip(value, to, strict=True)]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    elif isinstance(value, timedelta):
        return to
    else:
        # Small integers of C and of numpy stay where they are; numpy before 2.0 wraps, and warns.
        with warnings.catch_warnings(), suppress(OverflowError, DeprecationWarning):
            warnings.simplefilter("error", DeprecationWarning)
            return _number(value, to)
    return value


def _number(value: Any, to: Any) -> Any:
    """The number `to` in the value's class; an array is written in place."""
    if isinstance(value, array):
        value[:] = array(value.typecode, to)
    elif _is_array(value):
        value[...] = to
    else:
        return type(value)(to)
    return value


def _others(known: Collection[Any], count: int) -> list[int]:
    """New numbers, as many as `known` lacks to have `count` entries."""
    new = (number for number in itertools.count() if number not in known)
    return list(itertools.islice(new, max(0, count - len(known))))


def _entries(container: Any) -> list[Any]:
    """A container's entries (of a dict its keys and values in turn), by Python's own methods."""
    if isinstance(container, dict):
        return [part for pair in _kind_of(container).items(container) for part in pair]
    return [*container]


def _kind_of(container: dict[Any, Any]) -> Any:
    """Python's own class, `dict` or `OrderedDict`, whose methods read and write this dict."""
    return OrderedDict if isinstance(container, OrderedDict) else dict


def _nested(values: Any) -> Any:
    return tuple(map(_nested, values)) if isinstance(values, list) else values


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_number(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.number)


# What is in a container, by position or key: setting an entry sets it there


class ListItems(MutableMapping[Any, Any]):
    """The items of a list by position."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __getitem__(self, place: Any) -> Any:
        return self._items[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._items[place] = value

    def __delitem__(self, place: Any) -> None:
        del self._items[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(range(len(self._items)))

    def __len__(self) -> int:
        return len(self._items)


class DictEntries(MutableMapping[Any, Any]):
    """The entries of a dict, read and written without a user's class's own code."""

    def __init__(self, entries: dict[Any, Any]) -> None:
        self._entries = entries

    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self._entries, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        dict.__setitem__(self._entries, key, value)

    def __delitem__(self, key: Any) -> None:
        dict.__delitem__(self._entries, key)

    def __iter__(self) -> Iterator[Any]:
        return iter([*dict.keys(self._entries)])

    def __len__(self) -> int:
        return dict.__len__(self._entries)


class TupleItems(ListItems):
    """The items of a tuple, which cannot be set."""

    def __setitem__(self, place: Any, value: Any) -> None:
        pass

    def __delitem__(self, place: Any) -> None:
        pass


class InContext(MutableMapping[Any, Any]):
    """The value of a context variable, under one key; none if it has neither value nor default."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self._variable = variable

    def __getitem__(self, key: Any) -> Any:
        return self._variable.get()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._variable.set(value)

    def __delitem__(self, key: Any) -> None:
        """Do nothing: a variable that has got its first value cannot lose it again."""

    def __iter__(self) -> Iterator[Any]:
        return iter(["value"][: len(self)])

    def __len__(self) -> int:
        return int(self._variable.get(_MISSING) is not _MISSING)


_MISSING = object()
