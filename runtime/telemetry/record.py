"""Records the last steps of each rank, on the clock of rank 0, and writes them as a trace.

    pipe, step k    recorder.begin(k); recorder.record(instruction, began, ended) ...
    at the end      write(path, recorder, ...)        every rank; rank 0 gets all and writes

Times are those of what computes, on the clock of the host: on a GPU an instruction has begun and
ended when the GPU's stream came to it (`step.executor.Clock`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from autopipe.planfile.contents import Plan
from autopipe.report import perfetto
from autopipe.report.tracks import Event, Track, TrackedStep, bubbles
from autopipe.schedules.instructions import Instruction

LAST = 10
"""How many steps a recorder keeps: enough to see what varies, and a file that a browser opens."""

ROUNDS = 20
"""Messages to rank 0 and back for one clock difference; the fastest of them counts."""

Clock = Callable[[], float]
"""Seconds since some moment, another one on each machine: `perf_counter`."""


class Recorder:
    """Keeps what a rank did in the last steps of a run.

    Args:
        last: how many steps to keep. The first one of the run, which also allocates, is kept only
            as long as it is the only one.
    """

    def __init__(self, last: int = LAST) -> None:
        self._steps: deque[tuple[int, list[tuple[Instruction, float, float]]]] = deque(maxlen=last)
        self._begun = 0

    def begin(self, number: int) -> None:
        """Step `number` begins; what is recorded from here on is part of it."""
        if self._begun == 1:
            self._steps.clear()
        self._begun += 1
        self._steps.append((number, []))

    def record(self, instruction: Instruction, began: float, ended: float) -> None:
        """When an instruction ran, in seconds of this rank's clock; an `Executor.record`."""
        self._steps[-1][1].append((instruction, began, ended))

    def steps(self, offset: float = 0.0) -> tuple[TrackedStep, ...]:
        """The steps that are kept, with `offset` seconds added to their times."""
        return tuple(
            TrackedStep(number, tuple(Event(what, a + offset, b + offset) for what, a, b in found))
            for number, found in self._steps
            if found
        )


def difference(ask: Callable[[], float], clock: Clock, rounds: int = ROUNDS) -> float:
    """Seconds to add to `clock` for the time of another one, which `ask` asks for its time.

        clock         sent ----+                +---> back
        the other              +---> theirs ----+              theirs - (sent + back) / 2

    Of several rounds the shortest counts: whatever the ways there and back took, the difference is
    at most half of that round off (Cristian, "Probabilistic clock synchronization", Distributed
    Computing 3, 1989).
    """
    found = []
    for _ in range(rounds):
        sent = clock()
        theirs = ask()
        back = clock()
        found.append((back - sent, theirs - (sent + back) / 2))
    return min(found)[1]


def offset(
    group: dist.ProcessGroup | None, clock: Clock = perf_counter, rounds: int = ROUNDS
) -> float:
    """Seconds to add to this rank's `clock` for the time of the group's rank 0.

    All ranks of the group call it; rank 0 answers one after the other. It holds for now: clocks of
    two machines drift apart by microseconds in a second.

    Args:
        group: of gloo; None for a rank that is alone.
    """
    if group is None:
        return 0.0
    message = torch.zeros(1, dtype=torch.float64, device="cpu")

    def ask() -> float:
        dist.send(message, group=group, group_dst=0)
        dist.recv(message, group=group, group_src=0)
        return message.item()

    if dist.get_rank(group) > 0:
        return difference(ask, clock, rounds)
    for rank in range(1, dist.get_world_size(group)):
        for _ in range(rounds):
            dist.recv(message, group=group, group_src=rank)
            message[0] = clock()
            dist.send(message, group=group, group_dst=rank)
    return 0.0


def gather(
    recorder: Recorder,
    plan: Plan,
    rank: int,
    group: dist.ProcessGroup | None,
    clock: Clock = perf_counter,
) -> list[Track]:
    """The tracks of all ranks on the clock of rank 0, in their order; empty on every other rank.

    All ranks call it, `rank` being their own.

    Args:
        group: of gloo, all ranks of the run; None for a rank that is alone.
        clock: whose times were recorded.
    """
    place = plan.mesh.places[rank]
    part = place.tp if plan.mesh.tp > 1 else None
    own = Track(rank, recorder.steps(offset(group, clock)), place.dp, part)
    if group is None:
        return [own]
    found: list[Track | None] | None = [None] * len(plan.mesh.places) if rank == 0 else None
    dist.gather_object(own, found, group=group, group_dst=0)
    return [track for track in found or () if track is not None]


def write(
    path: Path,
    recorder: Recorder,
    plan: Plan,
    name: str,
    rank: int,
    group: dist.ProcessGroup | None,
    clock: Clock = perf_counter,
) -> tuple[float, ...]:
    """Write the trace of a run: what `recorder` kept on each of its ranks. All of them call it.

    Args:
        path: of the file that rank 0 writes; compressed if it ends in `.gz`.
        name: what the user calls the plan.
        group: of gloo, all ranks of the run; None for a rank that is alone.
        clock: whose times were recorded.

    Returns:
        On rank 0 each stage's bubble: the share of a step for which a rank that holds it does not
        compute, the median of its replicas. Empty on the others.

    Raises:
        AutopipeError: on rank 0, if the file cannot be written.
    """
    tracks = gather(recorder, plan, rank, group, clock)
    if rank > 0:
        return ()
    perfetto.save(path, tracks, perfetto.about(plan, name))
    return by_stage(tracks)


def by_stage(tracks: Sequence[Track]) -> tuple[float, ...]:
    """The bubble of each stage: the median of the ranks that hold it."""
    found: dict[int, list[float]] = {}
    for track, bubble in zip(tracks, bubbles(tracks), strict=True):
        for stage in track.stages:
            found.setdefault(stage, []).append(bubble)
    return tuple(median(found[stage]) for stage in sorted(found))
