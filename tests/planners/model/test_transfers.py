"""How tensors come to a stage: whole, or in parts that its group gathers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from autopipe.cluster.cluster import Link
from autopipe.planfile.parts import IN_PARTS, TRANSFERS, WHOLE
from autopipe.planners.model import memory
from autopipe.planners.model.estimate import estimate
from autopipe.planners.model.places import places
from autopipe.planners.model.problem import Constraints, Decision, Problem
from autopipe.planners.model.range_tables import Tables, tables
from autopipe.planners.model.transfers import arriving, gather_seconds, transfer_seconds
from tests.support.two_stages import LINK, PROBLEM, PROFILE, TWO_STAGES

#   crossings    0 -> 1 and 2: 8 bytes, gradient returns     divides
#                0 -> 2: 4 bytes, none                       divides
#                1 -> 2: 6 bytes, gradient returns           does not; not received by units 1 and 2
#
# The link between stages takes 0.25 s, and 4 bytes a second of all four ranks together: each rank
# of two tensor-parallel ones sends over a wire of its own.

DIVIDES = (True, True, False)


def problem(bandwidth: float, asked: str | None = None, latency: float = 0.0) -> Problem:
    """Two tensor-parallel ranks with a link of their own."""
    profile = replace(
        PROFILE,
        crossings=tuple(
            replace(crossing, divides=may)
            for crossing, may in zip(PROFILE.crossings, DIVIDES, strict=True)
        ),
    )
    return replace(
        PROBLEM,
        profiles=(profile,),
        tp=2,
        machine=replace(PROBLEM.machine, streams=2, within=(Link(latency, bandwidth),)),
        constraints=Constraints(transfers=asked),
    )


def received(found: Problem) -> Tables:
    """What the second stage, units 1 and 2, receives, as it arrives."""
    ranges = tables(found, found.profiles[0]).at(1, 3)
    return arriving(ranges, found, TWO_STAGES, places(found, TWO_STAGES, (0, 1))[1])


def test_seconds_of_parts_are_those_of_half_and_of_two_gathers() -> None:
    """Of 12 bytes there, 8 of which come back, half cross; the other halves are gathered."""
    found = problem(bandwidth=100.0, asked=IN_PARTS, latency=0.125)
    ranges = received(found)
    before = places(found, TWO_STAGES, (0, 1))[1].before
    assert (ranges.received, ranges.received_gradient) == (6, 4)
    between = transfer_seconds(ranges, found, TWO_STAGES, before)
    assert between == (6 + 4) / LINK.bandwidth + 2 * LINK.latency
    gathered = gather_seconds(ranges, found, 0)
    assert gathered == pytest.approx((0.125 + 6 / 100) + (0.125 + 4 / 100))


@pytest.mark.parametrize(("bandwidth", "in_parts"), [(100.0, True), (4.1, True), (3.9, False)])
def test_the_shorter_way_is_taken(bandwidth: float, in_parts: bool) -> None:
    """10 bytes less over 4 bytes a second, 10 bytes gathered: whichever link is faster."""
    assert bool(received(problem(bandwidth)).parted > 0) == in_parts


@pytest.mark.parametrize("bandwidth", [100.0, 3.9])
def test_what_is_asked_for_is_taken(bandwidth: float) -> None:
    assert received(problem(bandwidth, IN_PARTS)).parted == 12
    assert received(problem(bandwidth, WHOLE)).parted == 0


def test_a_stage_keeps_the_part_and_the_whole() -> None:
    """Of 12 bytes a micro-batch 6 more; two receives posted ahead are half as large."""
    whole, parts = (received(problem(100.0, asked)) for asked in (WHOLE, IN_PARTS))
    assert parts.saved + parts.received == whole.saved + whole.received + 6
    held = [memory.estimate(ranges, PROBLEM, TWO_STAGES, 1) for ranges in (whole, parts)]
    assert held[1][4] - held[0][4] == 6, "activations"
    assert held[1][5] < held[0][5], "transfers"


def test_an_estimate_says_which_stages_receive_in_parts() -> None:
    """The first stage receives nothing; the shorter way is no longer than either."""
    decision = Decision(TWO_STAGES, (1,))
    for bandwidth, latency in product((0.5, 4.0, 100.0), (0.0, 0.25)):
        free, *asked = (
            estimate(problem(bandwidth, way, latency), decision) for way in (None, *TRANSFERS)
        )
        assert [stage.in_parts for stage in asked[1].stages] == [False, True]
        assert not any(stage.in_parts for stage in asked[0].stages)
        assert free.step_seconds == min(each.step_seconds for each in asked)


def test_without_groups_nothing_goes_in_parts() -> None:
    ranges = tables(PROBLEM, PROFILE).at(1, 3)
    place = places(PROBLEM, TWO_STAGES, (0, 1))[1]
    assert arriving(ranges, PROBLEM, TWO_STAGES, place) is ranges
    assert not np.any(gather_seconds(ranges, PROBLEM, 0))
