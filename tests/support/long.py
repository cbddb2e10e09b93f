"""What `make test` runs a sample of, and `make test-long` runs whole.

    for seed in sampled(range(200), of=5):          seeds 0, 5, 10, ...: 40 of 200
    @pytest.mark.sweep(of=5)                        of a test's cases the first, sixth, ...
    @pytest.mark.long                               a test, or a case of one, for the long run alone
    share(40, of=5)                                 a share of 40 that a sample must reach: 8

A sample is the same at every run: the seeds are fixed. `AUTOPIPE_LONG=1` asks for the long run.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import pytest

LONG = os.environ.get("AUTOPIPE_LONG", "0") != "0"
"""Whether this is the long run: every sweep is made whole, and tests marked `long` run too."""

_Case = TypeVar("_Case")


def sampled(cases: Sequence[_Case], of: int) -> Sequence[_Case]:
    """All cases in the long run, else one of every `of`, from the first on."""
    return cases if LONG else cases[::of]


def share(count: int, of: int) -> int:
    """How many to find in a sample of one of every `of` where all cases have at least `count`."""
    return count if LONG else max(1, count // of)


def chosen(names: Iterable[str], now: Collection[str]) -> list[Any]:
    """Values of a parameter: those in `now` run always, the others in the long run."""
    found = [*names]
    assert {*now} <= {*found}, f"{sorted({*now} - {*found})} are none of {found}"
    return [pytest.param(name, marks=() if name in now else pytest.mark.long) for name in found]
