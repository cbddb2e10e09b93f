"""Recorded steps from words: which instruction from when to when."""

from autopipe.report.tracks import Event, TrackedStep
from autopipe.schedules.instructions import parse


def step(number: int, *events: str) -> TrackedStep:
    """`step(4, "0F0 0 1.5")`: an instruction, and when it began and ended."""
    words = [event.split() for event in events]
    return TrackedStep(number, tuple(Event(parse(w[0]), float(w[1]), float(w[2])) for w in words))
