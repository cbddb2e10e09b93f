"""A step as the longest of a few paths: worked by hand, and beside the walk at other costs."""

import random

import pytest

from autopipe.scaling.paths import paths
from autopipe.schedules.instructions import Channel, Flow, Kind, Programs
from autopipe.schedules.registry import make
from autopipe.schedules.simulate import Costs, LinkTime, simulate
from autopipe.schedules.transfers import Edge, insert

THERE, BACK = Channel(0, 1, Flow.ACTIVATION), Channel(1, 0, Flow.GRADIENT)

# The costs of two stages: F0 F1 B0 B1 sum0 sum1, and of each channel its latency and its wire.
COSTED = {
    Kind.FORWARD: [((0, 1.0),), ((1, 1.0),)],
    Kind.BACKWARD: [((2, 1.0),), ((3, 1.0),)],
    Kind.REDUCE: [((4, 1.0),), ((5, 1.0),)],
}
LINKS = {THERE: (((6, 1.0),), ((7, 1.0),)), BACK: (((8, 1.0),), ((9, 1.0),))}


def two(micro_batches: int) -> Programs:
    return insert(make("1f1b", 2, micro_batches), [Edge(0, 1, True)], [2])


def test_one_micro_batch_by_hand() -> None:
    """F0, over the link, F1 and B1, back over it, B0, and what stage 0 sums: the only path."""
    free = [1.0, 1.0, 2.0, 2.0, 0.5, 0.5, 0.1, 0.2, 0.1, 0.2]
    assert paths(two(1), COSTED, LINKS, [free]) == (
        tuple((cost, 1.0) for cost in (0, 1, 2, 3, 4, 6, 7, 8, 9)),
    )


def test_whichever_stage_is_slow_is_on_the_path() -> None:
    """Of three micro-batches a slow stage runs all three, the other one at each end."""
    nothing = [0.0] * 6
    slow0, slow1 = [9.0, 1.0, 9.0, 1.0, *nothing], [1.0, 9.0, 1.0, 9.0, *nothing]
    first, second = paths(two(3), COSTED, LINKS, [slow0, slow1])
    assert dict(first)[0] == dict(first)[2] == 3.0
    assert dict(second)[1] == dict(second)[3] == 3.0


def test_no_path_is_longer_than_the_step_at_any_costs() -> None:
    random.seed(0)
    draw = [[random.random() for _ in range(10)] for _ in range(40)]
    found, exact = paths(two(4), COSTED, LINKS, draw[:20]), 0
    for values in draw:
        links = {THERE: values[6:8], BACK: values[8:10]}
        costs = Costs.of(
            values[:2],
            values[2:4],
            reduce=values[4:6],
            links=lambda channel, links=links: LinkTime(links[channel][0], 1.0, links[channel][1]),
        )
        step = simulate(two(4), costs).seconds
        longest = max(sum(values[number] * n for number, n in path) for path in found)
        assert longest <= step * (1 + 1e-12)
        exact += longest == pytest.approx(step, rel=1e-12)
    assert exact >= 20, "it is the step at the points where paths were looked for"
