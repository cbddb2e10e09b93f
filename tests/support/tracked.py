"""Steps from words, which instruction from when to when, or from a predicted timeline."""

from collections import defaultdict

from autopipe.report.tracks import Arrival, Event, Track, TrackedStep
from autopipe.schedules.instructions import holders, parse
from autopipe.schedules.simulate import Timeline


def step(number: int, *events: str) -> TrackedStep:
    """`step(4, "0F0 0 1.5")`: an instruction, and when it began and ended."""
    words = [event.split() for event in events]
    return TrackedStep(number, tuple(Event(parse(w[0]), float(w[1]), float(w[2])) for w in words))


def from_timeline(timeline: Timeline, start: float = 0.0, number: int = 0) -> tuple[Track, ...]:
    """The tracks of a predicted step, one for each rank of the pipeline.

    Args:
        start: when the step begins; the start of a measured step draws both from one point.
        number: of the step.
    """
    rank_of = holders(timeline.programs)
    arrivals: dict[int, dict[Arrival, float]] = defaultdict(dict)
    for moved in timeline.transfers:
        there = arrivals[rank_of[moved.channel.target]]
        there[Arrival(moved.channel, moved.microbatch)] = start + moved.arrival
    sums: dict[int, list[Event]] = defaultdict(list)
    for span in timeline.sums:
        sums[span.rank].append(Event(span.instruction, start + span.start, start + span.end))
    tracks = []
    for rank, (program, ends) in enumerate(zip(timeline.programs, timeline.ends, strict=True)):
        times = [start, *(start + end for end in ends)]
        events = tuple(map(Event, program, times, times[1:]))
        step = TrackedStep(number, events, tuple(sums[rank]), arrivals[rank])
        tracks.append(Track(rank, (step,), run="predicted"))
    return tuple(tracks)
