"""Note and put back the positions of iterators and random generators that a model keeps.

    self.ids = itertools.cycle((0, 1))          self.rng = random.Random(0)
    x = self.layers[next(self.ids)](x)          if self.rng.random() < 0.5: ...

Python cannot read an iterator's position. While a model runs, each iterator that it keeps is
wrapped in a `Rewindable`, which notes the values it gives and can give them again.
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
    """Gives an iterator's values, and notes them in `values`, so that it can go back."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._again = deque[Any]()
        self.values: list[Any] = []

    def __next__(self) -> Any:
        return self._noted(self._again.popleft() if self._again else next(self._iterator))

    def send(self, value: Any) -> Any:
        """Send a value to a wrapped generator."""
        return self._noted(self._iterator.send(value))  # type: ignore[attr-defined]

    def _noted(self, value: Any) -> Any:
        self.values.append(value)
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __deepcopy__(self, memo: Any) -> Rewindable:
        return self

    def draw(self, count: int) -> None:
        """Draw `count` values, or as many as there are."""
        deque(itertools.islice(self, max(0, count)), maxlen=0)

    def back_to(self, count: int) -> None:
        """Go back to where `count` values had been drawn."""
        self._again.extendleft(reversed(self.values[count:]))
        del self.values[count:]

    def left(self) -> Iterator[Any]:
        """An iterator over the remaining values, without this wrapper where possible."""
        return itertools.chain(self._again, self._iterator) if self._again else self._iterator


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator of a class of Python's (`holders` finds a user's class)."""
    of_python = type(value).__module__ in ("builtins", "itertools")
    return of_python and isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of random numbers whose state can be read."""
    seedable = isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
    return seedable or _of_numpy(value) is not None


def place_of(value: Any) -> Any:
    """The position of a `Rewindable`, or a random generator's state; None: it is neither."""
    if isinstance(value, Rewindable):
        return len(value.values)
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    read_and_write = _of_numpy(value)
    return pickle.dumps(read_and_write[0]()) if read_and_write else None


def put_at(value: Any, place: Any) -> None:
    """Put a `Rewindable` or a random generator back to a place of `place_of`."""
    if isinstance(value, Rewindable):
        value.back_to(place)
    elif isinstance(value, random.Random):
        value.setstate(place)
    elif read_and_write := _of_numpy(value):
        read_and_write[1](pickle.loads(place))


def _of_numpy(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Two functions that read and write the state of a numpy.random.Generator or RandomState."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None or not isinstance(value, numpy.Generator | numpy.RandomState):
        return None
    if isinstance(value, numpy.RandomState):
        return value.get_state, value.set_state
    bits = value.bit_generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)
