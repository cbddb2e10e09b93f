"""Random numbers of which a graph has none: from Python's and numpy's generators, or seeded.

    random.random(), numpy.random.rand()     the generator that all code shares
    self.rng = random.Random(0)              a generator of the model's, wherever it is kept
    from random import random                a method of a generator
    torch.manual_seed(3)                     numbers of torch's own generator, from its seed on
    torch.randn(8, generator=self.own)       numbers of torch's, from a generator of the model's

Numbers from outside torch would be constants in a graph. A model may draw numbers that change
nothing (`if draw < self.layerdrop` with a layerdrop of 0): it makes the same calls of torch
whatever is drawn. Of torch's own numbers each op of a plan has a stream of its own, so what a model
seeds itself is refused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, MethodType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopipe.eager.frozen import numbered
from autopipe.eager.holders import Part, holders_of, weights_of
from autopipe.eager.iterators import is_generator, place_of, put_at
from autopipe.eager.second_run import Share, calls_of
from autopipe.errors import CaptureError
from autopipe.frontend import user_lines
from autopipe.ir.torch_patches import patched
from autopipe.ir.torch_private import TorchDispatchMode

RUNS = 8
"""Runs with other seeds."""

EXTREMES = 0.0, 1 - 2**-53
"""The least and the most that a draw from 0 to 1 gives."""


class Generators:
    """The generators of Python's random and of numpy.random, and those that a model keeps.

    Args:
        parts: the model and its loss; without them only Python's and numpy's are looked at.
    """

    def __init__(self, *parts: Part) -> None:
        self._kept = [
            (holder, key, value)
            for holder in holders_of(*parts)
            for key, value in holder.values().items()
            if is_generator(_generator(value))
        ]
        self._weights = numbered(weights_of(parts))
        found = [*(module.random for module in _modules()), *(value for *_, value in self._kept)]
        generators = {id(g): g for g in map(_generator, found) if is_generator(g)}
        self._all = list(generators.values())

    def places(self) -> Hashable:
        """The states of all generators."""
        return tuple(map(place_of, self._all))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within, the generators may be drawn from; afterwards their states are as before."""
        before = [place_of(generator) for generator in self._all]
        try:
            yield
        finally:
            for generator, place in zip(self._all, before, strict=True):
                put_at(generator, place)

    def check(self, before: Hashable, run: Callable[[], object]) -> None:
        """Refuse a model that has drawn from a generator, if what it computes depends on that.

        Args:
            before: `places` before it ran.
            run: runs the model once more.

        Raises:
            CaptureError: names the line that draws or, for numpy, the next line that calls torch.
        """
        if self.places() == before:
            return
        logs, draws = set(), _Draws(self)
        with self.restored():
            with draws:
                run()
            for seed in range(RUNS):
                for generator in self._all:
                    _seed(generator, seed)
                logs.add(calls_of(run, self._weights))
            for share in EXTREMES:  # of a rare event no seed may tell: random.random() < 0.01
                with self._giving(share):
                    logs.add(calls_of(run, self._weights))
            place = _line_of_python(run) or draws.place
        if len(logs) > 1:
            raise CaptureError(
                f"{place}: the model computes with random numbers that are not torch's "
                "(Python's random or numpy.random); they would be constants of its graph",
                hint="draw with torch, and use the number in torch: "
                "torch.where(torch.rand(()) < 0.5, self.layer(x), x)",
            )

    @contextmanager
    def _giving(self, share: float) -> Iterator[None]:
        """Within, every draw gives the least (share 0) or the most (share near 1) that it may."""
        alike = Share(share)
        with ExitStack() as until:
            for module in _modules():
                extreme = _ExtremeGenerator(alike, _generator(module.random))
                for name in DRAWS & vars(module).keys():
                    until.enter_context(patched(module, name, getattr(extreme, name)))
            for generator in self._all:
                if isinstance(generator, random.Random):  # its expovariate() asks its random()
                    until.enter_context(patched(generator, "random", alike.next))
            for holder, key, value in self._kept:
                extreme = _ExtremeGenerator(alike, _generator(value))
                until.callback(holder.entries.__setitem__, key, value)
                holder.entries[key] = extreme if extreme.generator is value else extreme.like(value)
            yield


DRAWS = frozenset(
    ("random", "random_sample", "rand", "uniform", "randrange", "randint", "integers", "choice")
)
"""The methods of generators whose results usually decide whether something happens."""


class _ExtremeGenerator:
    """Stands in for a generator: each of `DRAWS` gives the least, or the most, that it may.

    Draws of other kinds (`normal`, `shuffle`) are the generator's own.
    """

    def __init__(self, share: Share, generator: Any) -> None:
        self._share = share
        self.generator = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)

    def like(self, method: Any) -> Any:
        """This object's method in the place of the generator's method of the same name."""
        return getattr(self, method.__name__) if method.__name__ in DRAWS else method

    def random(self, size: Any = None, **_: Any) -> Any:
        return _filled(self._share.next(), size)

    random_sample = random

    def rand(self, *shape: int) -> Any:
        return _filled(self._share.next(), shape or None)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return _filled(low + (high - low) * self._share.next(), size)

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> Any:
        return self._among(range(start) if stop is None else range(start, stop, step))

    def randint(self, low: int, high: Any = None, size: Any = None, dtype: Any = int) -> Any:
        endpoint = isinstance(self.generator, random.Random)
        return self.integers(low, high, size, dtype, endpoint)

    def integers(
        self, low: int, high: Any = None, size: Any = None, dtype: Any = int, endpoint: bool = False
    ) -> Any:
        numbers = range(low) if high is None else range(low, high)
        return _filled(self._among(range(numbers.start, numbers.stop + endpoint)), size)

    def choice(self, items: Any, size: Any = None, replace: bool = True, p: Any = None) -> Any:
        return _filled(self._among(range(items) if isinstance(items, int) else items), size)

    def _among(self, items: Any) -> Any:
        return items[int(self._share.next() * len(items))]


def _filled(value: Any, size: Any) -> Any:
    return value if size is None else sys.modules["numpy"].full(size, value)


class _Draws(TorchFunctionMode):
    """Finds the first call of torch before which a number was drawn; `place` is its line."""

    def __init__(self, generators: Generators) -> None:
        super().__init__()
        self.place = ""
        self._generators = generators
        self._before = generators.places()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.place and self._generators.places() != self._before:
            self.place = user_lines.here()
        return func(*args, **(kwargs or {}))


def _line_of_python(run: Callable[[], object]) -> str:
    """The user's line at which a generator of Python's is drawn from; empty if none is."""
    places: list[str] = []

    def seen(frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and isinstance(_generator(called), random.Random):
            places.append(user_lines.here())

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(before)
    return places[0] if places else ""


def _generator(value: Any) -> Any:
    """The generator whose method `value` is, or `value` itself if it is no method."""
    method = isinstance(value, BuiltinFunctionType | MethodType)
    return getattr(value, "__self__", value) if method else value


def _modules() -> list[Any]:
    """Python's random, and numpy's if anything has imported it."""
    return [random, *(sys.modules[name] for name in ("numpy.random",) if name in sys.modules)]


def _seed(generator: Any, seed: int) -> None:
    if hasattr(generator, "seed"):
        generator.seed(seed)
    else:  # a numpy.random.Generator
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state


SEED = int.from_bytes(b"autopipe")
"""The seed of torch's generator during a watched run: one that no model is likely to set itself."""


@contextmanager
def seed_known() -> Iterator[None]:
    """Within, torch's generator begins at `SEED`; afterwards it is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        yield


class RefusedSeeds(TorchDispatchMode):
    """Refuses random ops that the model itself has seeded; entered within `seed_known`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = kwargs.get("generator") is not None
            if given or torch.initial_seed() != SEED:
                which = (
                    "from a generator of its own" if given else "after a seed that it sets itself"
                )
                raise CaptureError(
                    f"{user_lines.here()}: the model draws random numbers {which}; in a plan every "
                    "random op draws anew from a seed of run, step and micro-batch",
                    hint="draw fixed numbers once, in __init__, and keep them with register_buffer",
                )
        return func(*args, **kwargs)
