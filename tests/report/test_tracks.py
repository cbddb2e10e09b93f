"""Tracks of a run and of a prediction, and the share of a step for which a rank waits."""

import pytest

from autopipe.report.tracks import Arrival, Track, bubbles
from autopipe.schedules.instructions import Channel, Flow
from autopipe.schedules.registry import make
from autopipe.schedules.simulate import Costs, LinkTime, simulate
from tests.support.tracked import from_timeline, step


def test_names() -> None:
    middle = step(0, "1F0 0 1")
    assert str(Track(2, (middle,))) == "rank 2: stage 1, replica 0"
    assert str(Track(5, (step(0, "6F0 0 1", "1F0 1 2"),), 3)) == "rank 5: stages 1, 6, replica 3"
    assert str(Track(2, (middle,), 0, 1)) == "rank 2: stage 1, replica 0, part 1"
    assert str(Track(2, (middle,), run="predicted")) == "predicted rank 2: stage 1, replica 0"


def test_a_bubble_is_measured_against_the_whole_pipeline() -> None:
    """The step is from 0, when rank 0 begins, to 10, when rank 1 ends.

    rank 0  F---- WAIT-- B------ .          2 + 4 = 6 of 10
    rank 1  .... F---- B--------            3 + 5 = 8 of 10
            0 1 2 3 4 5 6 7 8 9 10
    """
    zero = step(7, "0F0 0 2", "0WAIT_B0<1 2 5", "0B0 5 9")
    one = step(7, "1WAIT_F0<0 1 2", "1F0 2 5", "1B0 5 10")
    assert bubbles([Track(0, (zero,)), Track(1, (one,))]) == pytest.approx((0.4, 0.2))


def test_the_median_step_counts() -> None:
    """Of the steps' 0.5, 0.75 and 0: one that was slow and one that was lucky change nothing."""
    steps = (
        step(1, "0F0 0 1", "0STEP 1 2"),
        step(2, "0F0 5 6", "0STEP 6 9"),
        step(3, "0F0 9 10", "0STEP 10 10"),
    )
    assert bubbles([Track(0, steps)]) == (0.5,)


def test_replicas_and_runs_have_steps_of_their_own() -> None:
    """Another replica's step 1 lasts four times as long, a prediction's half."""
    tracks = [
        Track(0, (step(1, "0F0 0 1", "0STEP 1 2"),)),
        Track(1, (step(1, "0F0 0 1", "0STEP 1 8"),), replica=1),
        Track(0, (step(1, "0F0 0 1"),), run="predicted"),
        Track(2, ()),
    ]
    assert bubbles(tracks) == (0.5, 0.875, 0.0, 0.0)


def test_a_step_of_no_time_has_no_bubble() -> None:
    assert bubbles([Track(0, (step(1, "0F0 3 3"),))]) == (0.0,)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_a_prediction_has_the_tracks_of_a_run(name: str) -> None:
    """Rank by rank each event begins when the one before it ends, and the bubbles are its own."""
    programs = make(name, 2, 4, chunks={"interleaved": 2, "zb-v": 2}.get(name, 1))
    timeline = simulate(programs, Costs.even(4 if name in ("interleaved", "zb-v") else 2))
    tracks = from_timeline(timeline, start=100.0, number=3)
    assert bubbles(tracks) == pytest.approx(timeline.bubbles)
    for track, program in zip(tracks, timeline.programs, strict=True):
        (found,) = track.steps
        assert (found.number, found.start) == (3, 100.0)
        assert tuple(event.instruction for event in found.events) == program
        ends = [event.end for event in found.events]
        assert [event.start for event in found.events] == [100.0, *ends[:-1]]
    assert max(t.steps[0].end for t in tracks) == pytest.approx(100 + timeline.seconds)


def test_a_prediction_knows_when_a_transfer_is_there() -> None:
    """F of 1 s, then half a second on the way: there at 101.5, on the rank that waits for it."""
    timeline = simulate(make("1f1b", 2, 1), Costs.even(2, link=LinkTime(latency=0.5)))
    zero, one = from_timeline(timeline, start=100.0)
    there = Arrival(Channel(0, 1, Flow.ACTIVATION), 0)
    assert one.steps[0].arrivals[there] == 101.5
    assert there not in zero.steps[0].arrivals
