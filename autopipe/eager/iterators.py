"""Iterators and generators of random numbers that a model draws from, and their places.

    self.ids = itertools.cycle((0, 1))          self.rng = random.Random(0)
    x = self.layers[next(self.ids)](x)          if self.rng.random() < 0.5: ...

An iterator keeps its place where nobody can look. While a model runs, each that it keeps is put
into a `Rewindable`, which notes what is drawn and can give it again.
"""

from __future__ import annotations

import io
import itertools
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class Rewindable(Iterator[Any]):
    """Gives what an iterator gives, and notes it: `values`."""

    def __init__(self, own: Iterator[Any]) -> None:
        self._own = own
        self._again = deque[Any]()
        self.values: list[Any] = []

    def __next__(self) -> Any:
        return self._noted(self._again.popleft() if self._again else next(self._own))

    def send(self, value: Any) -> Any:
        """As a generator has it."""
        return self._noted(self._own.send(value))  # type: ignore[attr-defined]

    def _noted(self, value: Any) -> Any:
        self.values.append(value)
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __deepcopy__(self, memo: Any) -> Rewindable:
        return self

    def draw(self, count: int) -> None:
        """Draw so many, or as many as there are."""
        deque(itertools.islice(self, max(0, count)), maxlen=0)

    def back_to(self, count: int) -> None:
        """As when so many were drawn."""
        self._again.extendleft(reversed(self.values[count:]))
        del self.values[count:]

    def left(self) -> Iterator[Any]:
        """An iterator that gives what this one would."""
        return itertools.chain(self._again, self._own) if self._again else self._own


def is_iterator(value: Any) -> bool:
    """Whether a value is one of Python's own iterators; those of a user's class have attributes."""
    own = type(value).__module__ in ("builtins", "itertools")
    return own and isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of random numbers whose place can be told."""
    own = isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
    return own or _of_numpy(value) is not None


def place_of(value: Any) -> Any:
    """Where an iterator or a generator of random numbers is, as a value; None: it is neither."""
    if isinstance(value, Rewindable):
        return len(value.values)
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    read_and_write = _of_numpy(value)
    return pickle.dumps(read_and_write[0]()) if read_and_write else None


def put_at(value: Any, place: Any) -> None:
    """Let it be at a place where it has been."""
    if isinstance(value, Rewindable):
        value.back_to(place)
    elif isinstance(value, random.Random):
        value.setstate(place)
    elif read_and_write := _of_numpy(value):
        read_and_write[1](pickle.loads(place))


def _of_numpy(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """How the state of a numpy.random.Generator or RandomState is read and written."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None or not isinstance(value, numpy.Generator | numpy.RandomState):
        return None
    if isinstance(value, numpy.RandomState):
        return value.get_state, value.set_state
    bits = value.bit_generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)
