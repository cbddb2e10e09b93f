"""Which blocks are recomputed: the sets that no other beats, against every set there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from random import Random

import numpy as np
import pytest

from autopipe.planners.model.block_parts import compositions, figures
from autopipe.planners.model.problem import WHOLE, Again, BlockLevel, Constraints, Problem, Saved
from autopipe.planners.model.recompute_sets import chosen, recompute_sets
from tests.support.problems import line, rich_problem


def with_blocks(
    blocks: tuple[tuple[int, int], ...],
    keeps: tuple[int, ...],
    seconds: tuple[float, ...],
    again: tuple[Again, ...] | None = None,
) -> Problem:
    """Units of one micro-batch; block b keeps `keeps[b]` bytes from its first unit to its last,
    and takes `seconds[b]` in each unit."""
    problem = line((1.0,) * blocks[-1][1], devices=1, constraints=Constraints(recompute=again))
    (profile,) = problem.profiles
    kept = tuple(
        Saved(size, first, (last - 1,), number)
        for number, ((first, last), size) in enumerate(zip(blocks, keeps, strict=True))
    )
    more = tuple(
        ((cost,) * (last - first),) for (first, last), cost in zip(blocks, seconds, strict=True)
    )
    return replace(
        problem, recomputable=blocks, profiles=(replace(profile, saved=kept, recompute=more),)
    )


FOUR = ((0, 1), (1, 2), (2, 3), (3, 4))


def found(problem: Problem, first: int, last: int, free: bool = True) -> list[tuple[int, float]]:
    """Bytes and seconds of the sets of a range."""
    sets = recompute_sets(problem, problem.profiles[0].rows, 0, free)
    number = compositions(problem).number[first, last]
    own = np.array(sets.numbers(number))
    return list(zip(sets.saved(own).tolist(), sets.spent(own).tolist(), strict=True))


def test_of_equal_blocks_only_their_number_matters() -> None:
    """Four blocks of 10 bytes and a second: none, one, ... four; and two of a range of two."""
    problem = with_blocks(FOUR, (10,) * 4, (1.0,) * 4)
    assert found(problem, 0, 4) == [(0, 0), (10, 1), (20, 2), (30, 3), (40, 4)]
    assert found(problem, 1, 3) == found(problem, 0, 2) == [(0, 0), (10, 1), (20, 2)]
    known = compositions(problem)
    assert known.classes.kinds == (0, 0, 0, 0)
    assert known.number[1, 3] == known.number[0, 2] != known.number[0, 3]


def test_blocks_that_cost_as_much_as_a_whole_are_one_kind_however_units_divide_them() -> None:
    """Two blocks of 10 bytes and 2 s: one of two units, one of a single unit.

    Whole, they are interchangeable, and the first is chosen first; in parts they are not.
    """
    problem = with_blocks(((0, 2), (2, 3)), (10, 10), (1.0, 2.0))
    assert found(problem, 0, 3) == [(0, 0), (10, 2), (20, 4)]
    known = compositions(problem)
    assert known.classes.kinds == (0, 1)
    assert known.number[0, 2] == known.number[2, 3] != known.number[1, 2]
    sets = recompute_sets(problem, 1, 0, True)
    (one,) = (row for row in sets.numbers(known.number[0, 3]) if sets.saved(row) == 10)
    assert chosen(problem, 0, 3, sets, one).again == (Again(0),)


def test_a_set_that_another_beats_is_left_out() -> None:
    """Blocks A 10 bytes in 1 s, B 10 bytes in 3 s, C 25 bytes in 2 s.

    bytes   10   20   25   35   45        A + B is slower than C and saves less; so is B alone
    sets    A    -    C   A C  A B C
    """
    problem = with_blocks(FOUR[:3], (10, 10, 25), (1.0, 3.0, 2.0))
    assert found(problem, 0, 3) == [(0, 0), (10, 1), (25, 2), (35, 3), (45, 6)]


def test_the_cheapest_set_that_saves_enough_is_found_and_the_last_where_none_does() -> None:
    problem = with_blocks(FOUR[:3], (10, 10, 25), (1.0, 3.0, 2.0))
    sets = recompute_sets(problem, 1, 0, True)
    whole = compositions(problem).number[0, 3]
    needed = np.array([0, 1, 10, 11, 26, 36, 45, 46, 1000])
    rows = sets.cheapest(np.full_like(needed, whole), needed)
    assert sets.saved(rows).tolist() == [0, 10, 10, 25, 35, 45, 45, 45, 45]


def test_a_set_is_made_of_blocks_again() -> None:
    """Of equal blocks the first so many."""
    problem = with_blocks(FOUR, (10, 20, 10, 20), (1.0, 1.5, 1.0, 1.5))
    sets = recompute_sets(problem, 1, 0, True)
    number = compositions(problem).number[0, 4]
    for row in sets.numbers(number):
        blocks = chosen(problem, 0, 4, sets, row).again
        assert sum((10, 20, 10, 20)[again.block] for again in blocks) == sets.saved(row)
        assert blocks == tuple(sorted(blocks))
    assert chosen(problem, 0, 4, sets, sets.numbers(number)[0]).again == ()
    # (10, 1.0) first, (20, 1.5) next: one of the second kind is block 1, of a range from 2 on 3.
    two = compositions(problem).number[2, 4]
    (row,) = (r for r in sets.numbers(two) if sets.saved(r) == 20)
    assert chosen(problem, 2, 4, sets, row).again == (Again(3),)


def test_a_part_of_a_block_saves_what_is_kept_in_that_part() -> None:
    """A block of three units that keeps 10 bytes in the first for the second, and 5 in the last."""
    problem = with_blocks(((0, 3),), (0,), (1.0,))
    (profile,) = problem.profiles
    kept = (Saved(10, 0, (1,), 0), Saved(5, 2, (2,), 0))
    problem = replace(problem, profiles=(replace(profile, saved=kept),))
    assert figures(problem, 1, 0, 0, (0, 3)) == (15, 3.0)
    assert figures(problem, 1, 0, 0, (0, 2)) == (10, 2.0)
    assert figures(problem, 1, 0, 0, (2, 3)) == (5, 1.0)
    # What unit 0 made has come from another stage, where the range begins behind it.
    assert figures(problem, 1, 0, 0, (1, 3)) == (5, 2.0)


def test_what_is_asked_for_runs_again_and_nothing_else() -> None:
    problem = with_blocks(FOUR, (10,) * 4, (1.0,) * 4, again=(Again(1), Again(2)))
    assert found(problem, 0, 4) == [(20, 2)]
    assert found(problem, 0, 1) == [(0, 0)]
    assert found(problem, 0, 2, free=False) == [(10, 1)], "also under a schedule in halves"
    none = with_blocks(FOUR, (10,) * 4, (1.0,) * 4, again=())
    assert found(none, 0, 4) == [(0, 0)]


def test_where_blocks_may_not_run_again_there_is_the_empty_set() -> None:
    problem = with_blocks(FOUR, (10,) * 4, (1.0,) * 4)
    assert found(problem, 0, 4, free=False) == [(0, 0)]


def by_brute_force(problem: Problem, rows: int, first: int, last: int) -> list[tuple[int, float]]:
    """All sets of the blocks of a range, each block not at all or at any of its levels, less those
    that another beats in bytes and seconds."""
    own = []
    for block, (start, stop) in enumerate(problem.recomputable):
        if start < last and stop > first:
            part = max(first - start, 0), min(last, stop) - start
            levels = problem.profile(rows).levels[block] if part == (0, stop - start) else ()
            whole = figures(problem, rows, 0, block, part)
            own.append([(0, 0.0), whole, *((saved, sum(seconds[0])) for saved, seconds in levels)])
    sets = product(*own)
    every = sorted((sum(s for _, s in one), -sum(b for b, _ in one)) for one in sets)
    best: list[tuple[int, float]] = []
    for seconds, lacking in every:
        if not best or -lacking > best[-1][0]:
            best.append((-lacking, seconds))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_sets_are_those_that_brute_force_leaves(seed: int) -> None:
    """Every range of a random problem, whole blocks and parts of them, at every size."""
    problem = rich_problem(seed)
    numbers = compositions(problem).number
    for profile in problem.profiles[:3]:
        sets = recompute_sets(problem, profile.rows, 0, True)
        for first, last in combinations(range(problem.units + 1), 2):
            number = numbers[first, last]
            own = np.array(sets.numbers(number))
            expected = by_brute_force(problem, profile.rows, first, last)
            assert sets.saved(own).tolist() == [size for size, _ in expected]
            assert sets.spent(own).tolist() == pytest.approx([cost for _, cost in expected])


@pytest.mark.parametrize("seed", range(10))
def test_where_no_set_saves_enough_the_last_is_known_before_any_is_made(seed: int) -> None:
    """It saves, costs and is made of what the last set is that is made, bit by bit."""
    problem = rich_problem(seed)
    numbers = compositions(problem).number
    sets = recompute_sets(problem, problem.profiles[0].rows, 0, True)
    for first, last in combinations(range(problem.units + 1), 2):
        asked = sets.cheapest(numbers[first, last], np.array(10**15))
        saved, spent = int(sets.saved(asked)), float(sets.spent(asked))
        made = sets.numbers(numbers[first, last])[-1]
        assert (saved, spent) == (int(sets.saved(made)), float(sets.spent(made)))
        assert sets.counts(int(asked)) == sets.counts(made)


def with_levels(count: int, levels: Sequence[BlockLevel]) -> Problem:
    """So many equal blocks of 10 bytes and 6 seconds each, with these levels between."""
    blocks = tuple((unit, unit + 1) for unit in range(count))
    problem = with_blocks(blocks, (10,) * count, (6.0,) * count)
    (profile,) = problem.profiles
    return replace(problem, profiles=(replace(profile, levels=(tuple(levels),) * count),))


def test_levels_of_equal_blocks_are_mixed() -> None:
    """Two blocks of which 4 bytes take a second, 7 take three and all 10 take six.

    bytes    4   7   8  11  14  17  20
    seconds  1   3   2   4   6   9  12       7 of one block take longer than 8 of two
    """
    problem = with_levels(2, [BlockLevel(4, ((1.0,),)), BlockLevel(7, ((3.0,),))])
    assert found(problem, 0, 2) == [(0, 0), (4, 1), (8, 2), (11, 4), (14, 6), (17, 9), (20, 12)]
    sets = recompute_sets(problem, 1, 0, True)
    numbers = sets.numbers(compositions(problem).number[0, 2])
    named = [chosen(problem, 0, 2, sets, numbers[place]).again for place in (1, 3, 5)]
    assert named == [(Again(0, 0),), (Again(0, 1), Again(1, 0)), (Again(0, WHOLE), Again(1, 1))]


@pytest.mark.parametrize("seed", range(10))
def test_of_many_mixtures_those_that_are_left_cost_less_than_a_step_too_much(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has to be saved, the set found costs less than one block's step from a level to the
    next more than the cheapest of all. And each of them is the cheapest for what it saves."""
    random = Random(seed)
    levels = sorted(
        (BlockLevel(random.randint(1, 99), ((random.uniform(0, 9),),)) for _ in range(3)),
        key=lambda level: level.seconds,
    )
    problem = with_levels(5, levels)
    exact = found(problem, 0, 5)
    monkeypatch.setattr("autopipe.planners.model.level_mixes.MOST_MIXES", 0)
    near = found(with_levels(5, levels), 0, 5)
    for size, cost in near:
        assert [c for s, c in exact if s == size] == [pytest.approx(cost)]
    steps = [b - a for (_, a), (_, b) in pairwise(near)]
    for size, cost in exact:
        enough = next(c for s, c in near if s >= size)
        assert enough < cost + max(steps) + 1e-9


def test_many_unlike_blocks_are_still_few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 blocks there are 4096 sets; with room for 50, some in between are left out, the empty
    one and the whole one are not."""
    monkeypatch.setattr("autopipe.planners.model.level_mixes.MOST_SETS", 50)
    random = Random(0)
    blocks = tuple((unit, unit + 1) for unit in range(12))
    keeps = tuple(2**n + random.randint(0, 1) for n in range(12))
    problem = with_blocks(blocks, keeps, tuple(float(size) for size in keeps))
    sets = found(problem, 0, 12)
    assert len(sets) <= 50
    assert (sets[0], sets[-1]) == ((0, 0), (sum(keeps), sum(keeps)))
