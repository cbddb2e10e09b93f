"""Sums over ranges beside brute force: item by item, for every range of random problems."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from autopipe.planners.model.problem import Crossing, Problem, Profile, Saved, Shared
from autopipe.planners.model.range_tables import Tables, dropped, tables
from tests.support.problems import machine, parted_problem, random_problem, rich_problem

Range = tuple[int, int]


def block_of(problem: Problem, item: Shared) -> Range | None:
    """The block that has all the units of a parameter."""
    inside = (b for b in problem.blocks if all(unit in range(*b) for unit in item.units))
    return next(inside, None)


def own(problem: Problem, items: tuple[Shared, ...], block: Range | None) -> tuple[Shared, ...]:
    return tuple(item for item in items if block_of(problem, item) == block)


def read(parameters: Iterable[Shared], copies: Iterable[Shared]) -> int:
    """Bytes as they are read: a copy's are half of its master's."""
    return sum(item.bytes for item in parameters) - sum(item.bytes for item in copies)


def meets(block: Range, i: int, j: int) -> bool:
    return any(unit in range(i, j) for unit in range(*block))


def fields(of: Tables) -> list[NDArray[np.generic]]:
    """One array after the other; of seconds there is one for each kind of device."""
    forward, backward, earlier, exchange, *others = vars(of).values()
    return [*forward, *backward, earlier, *exchange, *others]


def brute_force(problem: Problem, profile: Profile, i: int, j: int) -> tuple[float, ...]:
    """What the stage [i, j) pays, item by item, in the order of the fields of `Tables`."""
    stage = range(i, j)
    made_by = [(u, profile.made[u]) for u in stage if profile.made]

    def held(items: tuple[Shared, ...]) -> int:
        return sum(item.bytes for item in items if any(unit in stage for unit in item.units))

    def used_again(items: tuple[Shared, ...]) -> list[Shared]:
        return [item for item in items if sum(unit in stage for unit in item.units) > 1]

    units = problem.units
    last_use = max((s.units[-1] for s in problem.parameters if len(s.units) > 1), default=0)

    def made_before(end: int) -> int:
        """The most that the backward of a unit before `end` holds of what it has made."""
        return max([0, *(m - saved(profile.saved, u + 1, j) for u, m in made_by if u < end)])

    def received(crossing: Crossing) -> bool:
        return crossing.producer < i and any(unit in stage for unit in crossing.consumers)

    def onward(items: tuple[Shared, ...]) -> int:
        return sum(s.bytes for s in items if s.units[0] in stage and s.units[-1] >= j)

    def sent(crossing: Crossing) -> bool:
        return crossing.producer in stage and any(unit >= j for unit in crossing.consumers)

    def of(where: Range | None) -> list[tuple[Shared, ...]]:
        every = (*problem.parameters, *problem.frozen)
        return [own(problem, items, where) for items in (every, problem.copies)]

    def with_any(unit: int) -> int:
        """What is read of all parameters that a unit's block has any part in."""
        block = range(*next((b for b in problem.blocks if unit in range(*b)), (unit, unit + 1)))
        items = (*problem.parameters, *problem.frozen), problem.copies
        return read(*([s for s in kind if {*s.units} & {*block}] for kind in items))

    outside = of(None)
    alone = [[item for item in items if len(item.units) == 1] for items in outside]
    tied = [tuple(item for item in items if len(item.units) > 1) for items in outside]
    return (
        *(sum(kind[i:j]) for kind in profile.forward),
        *(sum(kind[i:j]) for kind in profile.backward),
        sum(min(kinds) for kinds in list(zip(*profile.backward, strict=True))[:i]),
        *(sum(kind[i:j]) for kind in profile.exchange),
        held(problem.parameters),
        held(problem.frozen),
        held(problem.constants),
        held(problem.copies),
        held(problem.parameters) - held(problem.copies) * problem.low_gradients,
        onward(problem.parameters) - onward(problem.copies) * problem.low_gradients,
        max(
            0,
            *(read(*of(block)) for block in problem.blocks if meets(block, i, j)),
            *(read(*([s for s in kind if s.units == (unit,)] for kind in alone)) for unit in stage),
        ),
        with_any(i),
        with_any(j - 1),
        held(tied[0]) - held(tied[1]),
        max(problem.largest[i:j], default=0),
        max(problem.largest[i:j], default=0) * (not profile.made),
        saved(profile.saved, i, j),
        max(
            made_before(units),
            made_before(last_use)
            + read(*map(used_again, (problem.parameters, problem.copies))) * bool(made_by),
        ),
        max(0, sum(profile.waiting[i:j])),
        max(profile.passing[i:j], default=0),
        sum(c.bytes for c in profile.crossings if received(c)),
        sum(c.bytes for c in profile.crossings if received(c) and c.gradient),
        sum(c.bytes for c in profile.crossings if sent(c)),
        sum(c.bytes for c in profile.crossings if sent(c) and c.gradient),
        sum(c.bytes for c in profile.crossings if received(c) and c.divides),
        sum(c.bytes for c in profile.crossings if received(c) and c.divides and c.gradient),
    )


def saved(items: tuple[Saved, ...], i: int, j: int) -> int:
    return sum(
        item.bytes
        for item in items
        if any(i <= unit < j for unit in item.savers)
        and (item.producer is None or i <= item.producer)
    )


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("seed", range(40))
def test_tables_are_sums_over_every_range(seed: int) -> None:
    """On as many kinds of devices as there are; every third second is one of exchanging."""
    problem = (random_problem, rich_problem, parted_problem)[seed % 3](seed)
    kinds = problem.profiles[0].forward
    exchange = tuple(tuple(seconds / 3 for seconds in kind) for kind in kinds)
    exchanging = tuple(replace(profile, exchange=exchange) for profile in problem.profiles)
    problem = replace(problem, profiles=exchanging)
    for profile in problem.profiles[:2]:
        every = tables(problem, profile)
        for i in range(problem.units):
            for j in range(i + 1, problem.units + 1):
                found = [float(value) for value in fields(every.at(i, j))]
                assert found == pytest.approx(brute_force(problem, profile, i, j), rel=1e-12)


def test_who_exchanges_nothing_takes_no_seconds_for_it() -> None:
    problem = random_problem(7)
    assert tables(problem, problem.profiles[0]).exchange == ()


def test_ranges_are_selected_in_any_shape() -> None:
    problem = rich_problem(5)
    every = tables(problem, problem.profiles[0])
    pairs = every.at([[0, 0], [1, 0]], [[1, 2], [2, 1]])
    for whole, some in zip(fields(every), fields(pairs), strict=True):
        assert some.tolist() == [[whole[0, 1], whole[0, 2]], [whole[1, 2], whole[0, 1]]]


@pytest.mark.parametrize("seed", range(10))
def test_some_items_alone_are_counted_as_all_are(seed: int) -> None:
    """The parts of `saved`: what a block keeps is taken out of it by the same rule."""
    problem = rich_problem(seed)
    profile = problem.profiles[0]
    for block in (None, *range(len(problem.recomputable))):
        own = tuple(item for item in profile.saved if item.block == block)
        found = dropped(problem.units, own)
        for i in range(problem.units):
            for j in range(i + 1, problem.units + 1):
                assert found[i, j] == saved(own, i, j)


def test_tables_are_zero_for_what_is_no_range() -> None:
    problem = random_problem(7)
    every = tables(problem, problem.profiles[0])
    assert all(not np.tril(values).any() for values in fields(every))


def test_tables_are_made_once_and_what_no_profile_changes_for_all_of_them() -> None:
    problem = next(p for p in map(random_problem, range(9)) if len(p.profiles) > 1)
    first, second = (tables(problem, profile) for profile in problem.profiles[:2])
    assert tables(problem, problem.profiles[0]) is first
    assert first.trainable is second.trainable
    # A problem is only itself, so that what is of one is never taken for another's.
    tight = replace(problem, machine=machine(1, 1))
    again = tables(tight, tight.profiles[0])
    assert again is not first and again.trainable is first.trainable


def test_what_zero_3_gathers_by_hand() -> None:
    """Blocks of units 1 and 2, and of unit 3; parameters of 10, 20, 4, 5 and 100 bytes.

        units        0    1    2    3    4
        blocks            |-------| |--|
        parameters   10   |- 20 -|  4    5      and 100 of units 2 and 3, so of no block

    The 100 are of two blocks, and stay. Unit 1 gathers all of its block; of masters (4 and 100)
    half as much is gathered. A forward begins with all that the first unit's block reads, 50 of
    what stays too, and a backward with all that the last one's reads.
    """
    problem = replace(
        random_problem(7),
        units=5,
        blocks=((1, 3), (3, 4)),
        parameters=tuple(
            Shared(size, units)
            for size, units in ((10, (0,)), (20, (1, 2)), (4, (3,)), (5, (4,)), (100, (2, 3)))
        ),
        constants=(),
        copies=(Shared(2, (3,)), Shared(50, (2, 3))),
    )
    profile = Profile(1, ((1.0,) * 5,), ((1.0,) * 5,), (), ())
    found = tables(replace(problem, profiles=(profile,)), profile)
    for (first, stop), tied, block, opening, closing in (
        ((0, 5), 50, 20, 10, 5),
        ((3, 4), 50, 2, 52, 52),
        ((1, 2), 0, 20, 70, 70),
        ((2, 4), 50, 20, 70, 52),
        ((0, 1), 0, 10, 10, 10),
        ((4, 5), 0, 5, 5, 5),
        ((2, 2), 0, 0, 0, 0),
    ):
        own = found.at(first, stop)
        assert (own.tied, own.block) == (tied, block)
        assert (own.opening, own.closing) == (opening, closing)
    assert found.read[0, 5] == 10 + 20 + 4 + 5 + 100 - 52
