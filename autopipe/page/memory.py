"""The memory of each rank over the step, as a curve: states, and tensors of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopipe.planfile import predict, programs
from autopipe.planfile.contents import Plan
from autopipe.report.recorded import MeasuredRun
from autopipe.scaling import links
from autopipe.scaling.expressions import BANDWIDTH, ROWS, TOKENS, value
from autopipe.scaling.moments import Numbering
from autopipe.scaling.sheet import Sheet
from autopipe.schedules.instructions import COMPUTE, Instruction, Kind, holders, parse
from autopipe.schedules.peak_memory import walk
from autopipe.schedules.phrases import short
from autopipe.util import numbers

MOST_RANKS = 8
"""Ranks that are drawn; of more the fullest."""


NEAR, FAR = 1 / 3, 1.5
"""The share of its room from which on a peak is drawn below its limit; and what of one that is less
is drawn above it."""


@dataclass(frozen=True)
class RankMemory:
    """A rank.

    Attributes:
        room, peak, states, measured: as texts; measured is empty without a run.
        at: the instruction of the peak, in words; empty where it is not known.
        line: points of the curve, x from 0 to 1000 over the step, y from 0 (none) to 1000 (top).
        floor: y of the states, `limit`: of the room; None: it is far above.
        when: percent of the step at which the peak is; None: no curve.
        level: percent of the height at which the peak is.
    """

    rank: int
    room: str
    peak: str
    states: str
    measured: str
    at: str
    line: str
    floor: float
    limit: float | None
    when: float | None
    level: float


@dataclass(frozen=True)
class MemoryChart:
    """The drawn ranks, of `total` ranks."""

    ranks: tuple[RankMemory, ...]
    total: int


@dataclass(frozen=True)
class _Curve:
    """Bytes over the step, without states: points of seconds and bytes; and when they are most."""

    points: tuple[tuple[float, int], ...]
    fullest: float


def of_plan(plan: Plan, sheet: Sheet | None, measured: MeasuredRun | None) -> MemoryChart:
    """The memory of a plan's ranks, with curves where its sheet is known."""
    placed = holders(programs.compute(plan))
    rooms = _rooms(plan)
    stages = [
        [stage for stage, holder in enumerate(placed) if holder == rank]
        for rank in range(plan.mesh.pp)
    ]
    peaks = [sum(plan.stages[s].predicted.memory.peak for s in of_rank) for of_rank in stages]
    curves = _curves(plan, sheet, stages) if sheet is not None else [None] * len(stages)
    fullest = sorted(range(len(peaks)), key=lambda rank: -peaks[rank] / rooms[rank])
    drawn = sorted(fullest[:MOST_RANKS])
    ranks = [
        _rank_memory(plan, rank, stages[rank], peaks[rank], rooms[rank], curves[rank], measured)
        for rank in drawn
    ]
    return MemoryChart(tuple(ranks), len(peaks))


def _rooms(plan: Plan) -> list[int]:
    row, numbered, limits = plan.cluster.row, predict.devices(plan), plan.planner.limits
    found = []
    for rank in range(plan.mesh.pp):
        own = numbered[plan.mesh.rank(rank, 0) : plan.mesh.rank(rank + 1, 0)]
        sizes = [row[device].memory for device in own]
        found.append(min([*sizes, *limits] if len(limits) == 1 else sizes))
    return found


def _rank_memory(
    plan: Plan,
    rank: int,
    stages: Sequence[int],
    peak: int,
    room: int,
    curve: _Curve | None,
    measured: MeasuredRun | None,
) -> RankMemory:
    memories = [plan.stages[stage].predicted.memory for stage in stages]
    states = sum(m.peak - m.activations - m.transfers - m.passing for m in memories)
    near = peak >= NEAR * room
    top = 1.08 * max(room, peak) if near else max(FAR * peak, 1.0)
    seen = sum(measured.stages[s].memory.seen for s in stages) if measured is not None else 0
    planned = sum(memory.seen for memory in memories)

    def y(size: float) -> float:
        return round(1000 * size / top, 1)

    line, when = "", None
    if curve is not None:
        step = max(plan.prediction.step_seconds, curve.points[-1][0]) or 1.0
        line = _line([(1000 * t / step, y(states + size)) for t, size in curve.points])
        when = round(100 * curve.fullest / step, 2)
    return RankMemory(
        rank=rank,
        room=numbers.memory(room),
        peak=numbers.memory(peak),
        states=numbers.memory(states),
        measured=f"{numbers.memory(seen)} of {numbers.memory(planned)} that a run sees"
        if seen
        else "",
        at=_instruction_words(plan.stages[stages[0]].predicted.fullest),
        line=line,
        floor=y(states),
        limit=y(room) if near else None,
        when=when,
        level=round(y(peak) / 10, 2),
    )


def _instruction_words(instruction: str) -> str:
    if not instruction:
        return ""
    parsed = parse(instruction)
    if parsed.kind in COMPUTE:
        return f"{parsed.kind.value}{parsed.microbatch} of stage {parsed.stage}"
    return short(parsed)


def _line(points: Sequence[tuple[float, float]]) -> str:
    """The d of an SVG path of steps, y downwards."""
    (first, level), *rest = points
    parts = [f"M{first:.1f} {1000 - level:.1f}"]
    for x, y in rest:
        parts.append(f"H{x:.1f}V{1000 - y:.1f}")
    return "".join(parts)


def _curves(plan: Plan, sheet: Sheet, stages: Sequence[Sequence[int]]) -> list[_Curve | None]:
    """Each rank's bytes, after each instruction of its program."""
    where = {
        ROWS: sheet.rows,
        TOKENS: sheet.tokens,
        BANDWIDTH: links.farthest(plan.cluster).link.bandwidth,
    }
    sizes = [round(value(size, where)) for size in sheet.sizes]
    numbering, timeline = Numbering.of(plan), predict.timeline(plan)
    found: list[_Curve | None] = []
    for rank, (program, ends) in enumerate(zip(timeline.programs, timeline.ends, strict=True)):
        own = {stage: numbering.sizes(plan, stage, sizes) for stage in stages[rank]}
        starts = dict(zip(program, [0.0, *ends], strict=False))
        points = [(0.0, 0)]
        points += [(starts[instruction], size) for instruction, size, _ in walk(program, own)]
        fullest = _fullest(plan.stages[stages[rank][0]].predicted.fullest, starts, points)
        points.append((ends[-1], points[-1][1]))
        found.append(_Curve(tuple(points), fullest))
    return found


def _fullest(
    text: str, starts: Mapping[Instruction, float], points: Sequence[tuple[float, int]]
) -> float:
    """When a rank is fullest: at the instruction that its plan says.

    Buckets of sums and gradients cast for the optimizer exist after the last computation.
    """
    if not text:
        return max(points, key=lambda point: point[1])[0]
    instruction = parse(text)
    if instruction.kind in (Kind.REDUCE, Kind.STEP):
        return max(start for other, start in starts.items() if other.kind not in COMPUTE)
    return starts.get(instruction, 0.0)
