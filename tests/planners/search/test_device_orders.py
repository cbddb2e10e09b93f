"""Orders of groups of devices: all that differ, and none twice."""

from __future__ import annotations

from itertools import permutations

from autopipe.planners.model.problem import Config, Constraints
from autopipe.planners.search.device_orders import classes, orders
from tests.support.problems import line


def test_groups_of_one_kind_and_size_are_one_class() -> None:
    """Kinds A A B C, and the last of them holds less than the B."""
    problem = line((1.0,) * 4, kinds=(0, 0, 1, 1), memory=(100, 100, 100, 50))
    assert classes(problem, Config(4, 1, 1, 0, "1f1b")) == ((0, 1), (2,), (3,))
    # Two by two they are as slow as the slower, and hold as much as the smaller.
    assert classes(problem, Config(2, 2, 1, 0, "1f1b")) == ((0,), (1,))


def test_every_order_of_classes_is_there_once() -> None:
    problem = line((1.0,) * 4, kinds=(0, 0, 1, 2))
    found = list(orders(problem, Config(3, 1, 1, 0, "1f1b")))
    kinds = [tuple(problem.machine.kinds[group] for group in order) for order in found]
    assert len(set(kinds)) == len(kinds)
    assert set(kinds) == {
        tuple(problem.machine.kinds[g] for g in order) for order in permutations(range(4), 3)
    }
    # Those of a class are taken in rank order.
    assert all(order.index(0) < order.index(1) for order in found if {0, 1} <= set(order))


def test_where_devices_are_alike_there_is_one_order() -> None:
    assert list(orders(line((1.0,) * 4, devices=4), Config(3, 1, 1, 0, "1f1b"))) == [(0, 1, 2)]


def test_where_a_device_holds_several_stages_the_order_is_that_of_ranks() -> None:
    problem = line((1.0,) * 4, kinds=(0, 1), constraints=Constraints(chunks=2))
    for schedule in ("interleaved", "zb-v"):
        config = Config(2, 1, 2, 0, schedule)
        assert classes(problem, config) == ((0, 1),)
        assert list(orders(problem, config)) == [(0, 1)]
