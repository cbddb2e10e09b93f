"""1F1B where ranks take turns at a stage: its picture, its pace, what it holds, and no deadlock."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Sequence

import pytest

from autopipe.errors import ScheduleError
from autopipe.report.draw_text import draw
from autopipe.schedules import deadlock
from autopipe.schedules.generators import (
    forward_only,
    held_in_turns,
    one_f_one_b,
    one_f_one_b_in_turns,
)
from autopipe.schedules.instructions import Kind, Programs
from autopipe.schedules.registry import flying, make
from autopipe.schedules.simulate import Costs, LinkTime, Timeline, simulate
from autopipe.schedules.transfers import Edge, insert

SOME = [(1, 2), (2, 1), (1, 2, 1), (1, 3, 1), (2, 3, 1), (1, 1, 2, 1), (3, 2, 1), (1, 2, 1, 2)]


def with_transfers(turns: Sequence[int], programs: Programs, window: int = 2) -> Programs:
    """A chain: each entry of a stage to those of the next one that it meets."""
    firsts = [0, *itertools.accumulate(turns)]
    gradient = any(i.kind is Kind.BACKWARD for program in programs for i in program)
    edges = [
        Edge(firsts[s] + one, firsts[s + 1] + other, gradient)
        for s, (n, following) in enumerate(itertools.pairwise(turns))
        for one in range(n)
        for other in range(following)
        if (one - other) % math.gcd(n, following) == 0
    ]
    return insert(programs, edges, [window] * (len(turns) - 1), 1, turns)


def run(turns: Sequence[int], programs: Programs) -> Timeline:
    """A forward takes as long as a stage has ranks, a backward twice as long, links nothing."""
    forward = [float(n) for n in turns for _ in range(n)]
    costs = Costs.of(
        forward,
        [2 * seconds for seconds in forward],
        reduce=[0.0] * len(forward),
        links=lambda channel: LinkTime(),
    )
    return simulate(with_transfers(turns, programs), costs)


def divisions(ranks: int) -> Iterator[tuple[int, ...]]:
    """All ways to have so many ranks in stages."""
    if not ranks:
        yield ()
    for first in range(1, ranks + 1):
        for rest in divisions(ranks - first):
            yield (first, *rest)


def test_the_picture_in_the_docstring_is_true() -> None:
    lines = (inspect.getdoc(one_f_one_b_in_turns) or "").splitlines()
    shown = [line.strip() for line in lines if line.startswith("    rank ")]
    assert draw(run((1, 2), one_f_one_b_in_turns((1, 2), 5))) == "\n".join(shown)


@pytest.mark.parametrize("turns", SOME)
def test_ranks_that_are_equally_busy_never_wait_once_the_pipeline_is_full(
    turns: tuple[int, ...],
) -> None:
    """A micro-batch takes 3 seconds a rank on its way, and each further one 3 seconds."""
    m = 4 * math.lcm(*turns)
    seconds = run(turns, one_f_one_b_in_turns(turns, m)).seconds
    assert seconds <= 3 * sum(turns) + 3 * (m - 1)


@pytest.mark.parametrize("turns", [*SOME, (1, 1, 1)])
def test_what_ranks_hold(turns: tuple[int, ...]) -> None:
    for m in range(max(turns), 9):
        programs = one_f_one_b_in_turns(turns, m)
        counted = [flying(program, rank) for rank, program in enumerate(programs)]
        assert counted == [
            min(held, len(range(own, m, n)))
            for n, held in zip(turns, held_in_turns(turns, m), strict=True)
            for own in range(n)
        ]


def test_one_rank_each_is_1f1b() -> None:
    assert one_f_one_b_in_turns((1, 1, 1), 5) == one_f_one_b(3, 5)


def test_no_division_of_ranks_locks_up() -> None:
    for turns in itertools.chain.from_iterable(map(divisions, range(2, 6))):
        for m in range(max(turns), 8):
            programs = make("1f1b", sum(turns), m, turns=turns)
            deadlock.check(with_transfers(turns, programs, window=1))


def test_an_evaluation_of_fewer_micro_batches_than_ranks() -> None:
    """The second of the two ranks has nothing to do."""
    programs = forward_only((0, 1, 2, 3), 1, (1, 2, 1))
    assert [len(program) for program in programs] == [1, 1, 0, 1]
    deadlock.check(with_transfers((1, 2, 1), programs), placed=range(4))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"name": "gpipe", "turns": (1, 2)}, "gpipe has each stage on one rank"),
        ({"name": "1f1b", "turns": (1, 1)}, "turns 1, 1 are 2 ranks, found 3"),
        ({"name": "1f1b", "micro_batches": 1, "turns": (1, 2)}, "2 ranks take turns at stage 1"),
        ({"name": "1f1b", "turns": (3, 0)}, "at least 1 rank, found 0"),
    ],
)
def test_what_takes_no_turns(asked: dict[str, object], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        make(**{"ranks": 3, "micro_batches": 4, **asked})  # type: ignore[arg-type]
