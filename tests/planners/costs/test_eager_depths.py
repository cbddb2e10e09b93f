"""Windows and depths: beside brute force, and where a link is slow."""

import itertools
import random

import pytest

from autopipe.planners.costs.eager_depths import WORTH, choose
from autopipe.planners.model.eager_period import EagerPipeline, StageLink, extra_bytes, period
from autopipe.schedules.registry import make
from autopipe.schedules.simulate import Costs, simulate
from autopipe.schedules.transfers import Edge, insert
from tests.support.operations import lines


def alike(stages, micro_batches, way, *, wire=0.0, room=10**9, slow=None):
    """Stages of F + B = 3, one byte a micro-batch in flight or posted; `slow`: (boundary, way)."""
    ways = [way] * (stages - 1)
    if slow:
        ways[slow[0]] = slow[1]
    boundaries = [StageLink(latency, 1.0, wire, wire, 1) for latency in ways]
    ones = [1] * stages
    return EagerPipeline(
        [1.0] * stages, [2.0] * stages, boundaries, micro_batches, ones, [room] * stages
    )


def step(pipeline, depths, windows):
    """The predicted step, every micro-batch simulated."""
    stages = len(pipeline.forward)
    compute = make("eager-1f1b", stages, pipeline.micro_batches, depths=depths)
    edges = [Edge(stage, stage + 1, gradient=True) for stage in range(stages - 1)]
    costs = Costs.of(pipeline.forward, pipeline.backward, links=pipeline.link)
    return simulate(insert(compute, edges, windows), costs).seconds


def grid(pipeline, depths, windows):
    """Every choice that fits, of depths below `depths` and windows from 1 to `windows`."""
    boundaries = len(pipeline.boundaries)
    for deep in itertools.product(range(depths), repeat=boundaries):
        for wide in itertools.product(range(1, windows + 1), repeat=boundaries):
            sizes = extra_bytes(pipeline, deep, wide)
            if all(size <= room for size, room in zip(sizes, pipeline.room, strict=True)):
                yield deep, wide


def random_pipeline(rng):
    stages = rng.choice([2, 2, 3])

    def each(count, *numbers):
        return [rng.choice(numbers) for _ in range(count)]

    boundaries = [
        StageLink(*each(1, 0.0, 0.1, 0.5, 2.0, 5.0), 1.0, *each(2, 0, 0.1, 1, 2), *each(1, 0, 1, 3))
        for _ in range(stages - 1)
    ]
    return EagerPipeline(
        [rng.uniform(0.8, 1.2) for _ in range(stages)],
        [rng.uniform(1.6, 2.4) for _ in range(stages)],
        boundaries,
        rng.choice([2, 4, 8, 12]),
        each(stages, 1, 2, 5),
        each(stages, -1, 0, 3, 10, 30, 1000),
    )


def test_no_choice_of_a_grid_is_much_better():
    """Depths to 3, windows to 3, all that fit: none is 1 % faster."""
    rng = random.Random(5)
    deeper = 0
    for _ in range(40):
        pipeline = random_pipeline(rng)
        found = choose(pipeline)
        assert found.bytes == extra_bytes(pipeline, found.depths, found.windows)
        for size, room in zip(found.bytes, pipeline.room, strict=True):
            assert size <= max(room, 0)
        mine = step(pipeline, found.depths, found.windows)
        assert found.seconds == pytest.approx(mine)
        assert mine >= found.bound * (1 - 1e-9)
        choices = {c: step(pipeline, *c) for c in grid(pipeline, 4, 3)}
        assert mine <= 1.01 * min([mine, *choices.values()])
        deeper += max(found.depths) > 0
    assert 10 < deeper < 40


def test_a_pipeline_without_latency_needs_nothing():
    found = choose(alike(4, 16, 0.0))
    assert (found.depths, found.windows) == ((0, 0, 0), (1, 1, 1))
    assert found.seconds == found.bound == (16 + 3) * 3.0
    assert choose(alike(1, 4, 0.0)).depths == ()


def test_one_slow_link_gets_the_depth_and_the_others_get_none():
    """The others are fast; 3 is 2 * 4 / (1 + 2), rounded up."""
    found = choose(alike(8, 64, 0.001, slow=(3, 4.0)))
    assert found.depths == (0, 0, 0, 3, 0, 0, 0)
    assert found.windows == (1, 1, 1, 3, 1, 1, 1)
    assert found.bytes == (3, 3, 3, 5, 2, 0, 0, 0)


def test_a_wire_that_is_slower_than_the_computation_is_the_pace():
    """5 seconds of bytes on each wire, 3 of computation: depth hides the way, not the wire."""
    pipeline = alike(3, 16, 0.5, wire=5.0)
    found = choose(pipeline)
    assert period(pipeline, found.depths, found.windows) == pytest.approx(5.0, rel=2 * WORTH)
    assert found.seconds < 1.01 * found.bound
    assert max(found.depths) <= 3


def test_no_more_than_the_room():
    """Stage 0 has room for two more in flight; a third would pay."""
    whole, little = choose(alike(2, 32, 6.0)), choose(alike(2, 32, 6.0, room=2))
    assert whole.depths == (4,) and max(whole.bytes) > 2
    assert little.depths == (1,) and little.windows == (2,) and max(little.bytes) == 2
    assert choose(alike(2, 32, 6.0, room=-5)).bytes == (0, 0)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "limit"),
    [(8, 64, 3e6), pytest.param(16, 64, 9e6, marks=pytest.mark.long)],
)
def test_a_choice_takes_so_many_lines_of_python(stages, micro_batches, limit):
    """Measured: 1.4 and 4.2 million, of which a processor runs some ten million a second."""
    pipeline = alike(stages, micro_batches, 0.5, wire=0.1)
    assert lines(lambda: choose(pipeline)) < limit


@pytest.mark.parametrize(
    ("stages", "micro_batches"), [(8, 64), pytest.param(64, 512, marks=pytest.mark.long)]
)
def test_large_pipelines_are_chosen_for(stages, micro_batches):
    pipeline = alike(stages, micro_batches, 0.5, wire=0.1)
    found = choose(pipeline)
    assert found.seconds < 1.01 * found.bound
    assert found.seconds == pytest.approx(step(pipeline, found.depths, found.windows), rel=1e-3)
