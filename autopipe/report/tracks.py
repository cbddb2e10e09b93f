"""The events of steps, rank by rank on one clock.

    Track                       a rank
    +-- TrackedStep             of the steps that were kept
        +-- Event               an instruction, and when it began and ended

Seconds count from wherever the clock does; `report.perfetto` draws from the first event on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from autopipe.schedules.instructions import COMPUTE, Channel, Instruction


class Event(NamedTuple):
    """An instruction with its begin and end, in seconds."""

    instruction: Instruction
    start: float
    end: float


class Arrival(NamedTuple):
    """The tensors of one micro-batch on one channel."""

    channel: Channel
    microbatch: int


@dataclass(frozen=True)
class TrackedStep:
    """What one rank did in one step.

    Args:
        number: of the step in its run.
        events: one after the other, in the order of the rank's program; at least one.
        sums: the sums of gradients, each named by its REDUCE; empty where they are not known one
            by one. A run knows when its STEP ended, which waits for all of them.
        arrivals: when transfers to this rank arrived; without those not known. A run knows when
            a WAIT ended.
    """

    number: int
    events: tuple[Event, ...]
    sums: tuple[Event, ...] = ()
    arrivals: Mapping[Arrival, float] = field(default_factory=dict)

    @property
    def start(self) -> float:
        """Seconds at which the rank began its program."""
        return self.events[0].start

    @property
    def end(self) -> float:
        """Seconds at which the rank's last event ended."""
        return self.events[-1].end

    @property
    def busy(self) -> float:
        """Seconds in F, B, I and W."""
        return sum(e.end - e.start for e in self.events if e.instruction.kind in COMPUTE)

    def bubble(self, wall: float) -> float:
        """The share of `wall` seconds for which the rank does not compute."""
        return 1 - self.busy / wall if wall else 0.0


class PipelineKey(NamedTuple):
    """The coordinates that all ranks of one pipeline share; see `Track`."""

    run: str
    replica: int
    part: int | None


@dataclass(frozen=True)
class Track:
    """The events of one rank in the recorded steps of a run.

    Args:
        replica: its data-parallel coordinate.
        part: its tensor-parallel coordinate; None where there is only one.
        run: a word that tells these tracks from another run's, such as "predicted".
    """

    rank: int
    steps: tuple[TrackedStep, ...]
    replica: int = 0
    part: int | None = None
    run: str = ""

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that the rank holds, from the lowest; none without a step."""
        return tuple(sorted({e.instruction.stage for step in self.steps for e in step.events}))

    @property
    def pipeline(self) -> PipelineKey:
        """The key of the rank's pipeline."""
        return PipelineKey(self.run, self.replica, self.part)

    def __str__(self) -> str:
        """`rank 2: stage 1, replica 0`; `predicted rank 0: stages 0, 3, replica 0`."""
        words = [", ".join(map(str, self.stages)), f"replica {self.replica}"]
        words += [] if self.part is None else [f"part {self.part}"]
        several = "" if len(self.stages) == 1 else "s"
        return f"{self.run} rank {self.rank}: stage{several} {', '.join(words)}".lstrip()


def walls(tracks: Iterable[Track]) -> dict[tuple[PipelineKey, int], float]:
    """Seconds of each pipeline's steps, by number: from its first event to its last one."""
    found: dict[tuple[PipelineKey, int], tuple[float, float]] = {}
    for track in tracks:
        for step in track.steps:
            key = track.pipeline, step.number
            start, end = found.get(key, (math.inf, -math.inf))
            found[key] = min(start, step.start), max(end, step.end)
    return {key: end - start for key, (start, end) in found.items()}


def bubbles(tracks: Sequence[Track]) -> tuple[float, ...]:
    """Each track's bubble: the share of a step for which its rank does not compute, in the median.

        1 - seconds in F, B, I and W / seconds from its pipeline's first event to the last one

    0 for a track without steps.
    """
    seconds = walls(tracks)
    return tuple(
        median([step.bubble(seconds[track.pipeline, step.number]) for step in track.steps] or [0.0])
        for track in tracks
    )
