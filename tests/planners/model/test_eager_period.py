"""The law of eager 1F1B: by hand, beside the simulation, and beside the schedule."""

import random

import pytest

from autopipe.errors import ScheduleError
from autopipe.planners.model.eager_period import (
    EagerPipeline,
    StageLink,
    bound,
    check,
    extra_bytes,
    flights,
    period,
)
from autopipe.schedules.registry import in_flight, make
from autopipe.schedules.simulate import Costs, simulate
from autopipe.schedules.transfers import Edge, insert


def alike(stages, micro_batches, way, *, wire=0.0, held=1, posted=1):
    """Stages of F + B = 3; `way` is the latency, `wire` the seconds of bytes."""
    boundary = StageLink(way, 1.0, wire, wire, posted)
    return EagerPipeline(
        *([1.0] * stages, [2.0] * stages, [boundary] * (stages - 1), micro_batches),
        *([held] * stages, [0] * stages),
    )


@pytest.mark.parametrize(
    ("stages", "way", "wire", "depth", "window", "expected"),
    [
        (1, 0.0, 0.0, 0, 1, 3),  # one stage computes
        (2, 2.0, 0.0, 0, 2, 3 + 2),  # F + B + c
        (2, 2.0, 0.0, 1, 2, 2 * (3 + 2) / 3),  # 2 (F + B + c) / (e + 2)
        (2, 2.0, 0.0, 2, 2, 3),  # e >= 2c / (F + B): hidden
        (4, 2.0, 0.0, 0, 2, (4 * 3 + 6 * 2) / 4),
        (4, 2.0, 0.0, 1, 2, (4 * 3 + 6 * 2) / 7),
        (4, 1.0, 1.0, 1, 2, (4 * 3 + 6 * 2) / 7),  # latency and bytes alike
        (2, 6.0, 0.0, 9, 1, 2 * 6),  # a receive's notice and its tensor, one at a time
        (2, 6.0, 0.0, 9, 3, 2 * 6 / 3),
        (2, 0.0, 5.0, 9, 9, 5),  # the wire
    ],
)
def test_the_period_by_hand(stages, way, wire, depth, window, expected):
    pipeline = alike(stages, 64, way, wire=wire)
    boundaries = stages - 1
    assert period(pipeline, [depth] * boundaries, [window] * boundaries) == pytest.approx(expected)


def steps(pipeline, depths, windows, *micro_batches):
    stages = len(pipeline.forward)
    edges = [Edge(stage, stage + 1, gradient=True) for stage in range(stages - 1)]
    costs = Costs.of(pipeline.forward, pipeline.backward, links=pipeline.link)
    for m in micro_batches:
        compute = make("eager-1f1b", stages, m, depths=depths)
        yield simulate(insert(compute, edges, windows), costs).seconds


def test_the_simulation_has_no_slower_cycle_than_the_law():
    """120 micro-batches more take 120 periods, whatever the stages, links, depths and windows.

    But for a rest of less than a turn of the slowest cycle, which is not one micro-batch.
    """
    rng = random.Random(3)
    for _ in range(40):
        stages = rng.randint(2, 4)
        boundaries = [
            StageLink(
                rng.uniform(0, 6), 1.0, *(rng.choice([0, rng.uniform(0, 4)]) for _ in "FB"), 1
            )
            for _ in range(stages - 1)
        ]
        pipeline = EagerPipeline(
            [rng.uniform(0.5, 1.5) for _ in range(stages)],
            [rng.uniform(1.0, 3.0) for _ in range(stages)],
            boundaries,
            240,
            [1] * stages,
            [0] * stages,
        )
        depths = [rng.randint(0, 3) for _ in boundaries]
        windows = [rng.randint(1, 4) for _ in boundaries]
        few, many = steps(pipeline, depths, windows, 120, 240)
        assert (many - few) / 120 == pytest.approx(period(pipeline, depths, windows), rel=5e-3)
        assert many >= bound(pipeline)


def test_what_is_in_flight_is_what_the_schedule_says():
    for depths in ((0, 0, 0), (1, 0, 2), (3, 3, 3)):
        for m in (1, 4, 6, 12):
            expected = [in_flight("eager-1f1b", 4, m, stage, depths=depths) for stage in range(4)]
            assert list(flights(alike(4, m, 0.0), depths)) == expected


def test_bytes_are_counted_from_depths_of_nothing_and_windows_of_one():
    """Micro-batches of 10 in flight, buffers of 7 on both sides of a boundary."""
    pipeline = alike(3, 8, 0.0, held=10, posted=7)
    assert extra_bytes(pipeline, [0, 0], [1, 1]) == (0, 0, 0)
    assert extra_bytes(pipeline, [2, 1], [1, 1]) == (30, 10, 0)
    assert extra_bytes(pipeline, [0, 0], [3, 2]) == (14, 21, 7)
    # No more than the 8 of the step: 5 in flight besides 3, 7 posted besides 1.
    assert extra_bytes(pipeline, [99, 0], [99, 1]) == (50 + 49, 49, 0)


def test_the_bound_is_the_slowest_stage_with_the_way_to_it_and_back():
    """Stage 1 takes 3 + 4 for each of 5; F0 and B4 of stage 0, and 0.5 each way, come besides.

    A wire that takes 9: ten tensors, the way back of the last one, F + B of both stages.
    """
    boundary = StageLink(0.5, 1.0, 0, 0, 0)
    pipeline = EagerPipeline([1.0, 3.0], [2.0, 4.0], [boundary], 5, [0, 0], [0, 0])
    assert bound(pipeline) == 5 * (3 + 4) + 1 + 2 + 2 * 0.5
    assert bound(alike(2, 10, 0.0, wire=9.0)) == 10 * 9.0 + 9.0 + 2 * 3.0


def test_numbers_of_another_pipeline_are_refused():
    with pytest.raises(ScheduleError, match="expected 1 boundaries of 2 stages, found 0"):
        check(EagerPipeline([1.0] * 2, [1.0] * 2, [], 4, [1] * 2, [1] * 2))
    with pytest.raises(ScheduleError, match="at least 1 stage and 1 micro-batch, found 1 and 0"):
        check(EagerPipeline([1.0], [1.0], [], 0, [1], [1]))
