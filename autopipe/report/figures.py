"""Make a table of each stage's seconds and bytes, as texts; and one of them as measured, too.

stage  forward  backward  bubble   peak  weights ...       equal stages that follow each other
0      24.1 ms   48.2 ms    12 %  105.2     20.1           share a row
1-30   24.5 ms     49 ms   9.8 %   93.0     20.4
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from autopipe.planfile import predict, programs
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Memory, StagePrediction
from autopipe.report import paper
from autopipe.report.paper import Table
from autopipe.schedules.instructions import holders
from autopipe.util import numbers
from autopipe.util.numbers import Amount, percent, ranges

PARTS: Mapping[str, Callable[[Memory], int]] = {
    "peak": lambda memory: memory.peak,
    "weights": lambda memory: memory.parameters + memory.copies + memory.buffers,
    "grads": lambda memory: memory.gradients,
    "optimizer": lambda memory: memory.optimizer,
    "activations": lambda memory: memory.activations,
    "transfers": lambda memory: memory.transfers + memory.passing,
}
"""What the bytes of a device are for; the first is the sum of the others."""

MOST_ROWS = 6
"""Rows of a table that fits a screen; of more stages those are shown that matter."""


@dataclass(frozen=True)
class Figures:
    """A table of the stages, with the unit of its bytes.

    Attributes:
        parts: the first column of those that make up the peak, which stands before it.
        unit: of bytes, `MiB`.
        folded: how many stages share a row that are not equal.
    """

    table: Table
    parts: int
    unit: str
    folded: int


def figures(plan: Plan, *, all_of_them: bool = False) -> Figures:
    """Make the table of each stage's seconds and bytes.

    Equal stages that follow each other share a row.

    Args:
        all_of_them: not only those that a screen has room for: the first, the slowest, the one
            that holds most, the last. Those between them share a row that says from what to what
            their figures go.
    """
    amount = Amount(max(stage.predicted.memory.peak for stage in plan.stages))
    ranks = holders(programs.compute(plan))
    bubbles = predict.timeline(plan).bubbles
    kinds, alone = _kinds(plan, ranks), len(plan.stages) == plan.mesh.pp
    formats: list[Callable[[Any], str]] = [
        numbers.seconds,
        numbers.seconds,
        percent,
        *(amount for _ in PARTS),
    ]
    values = [
        (
            stage.predicted.forward_seconds,
            stage.predicted.backward_seconds,
            bubbles[rank],
            *(part(stage.predicted.memory) for part in PARTS.values()),
        )
        for stage, rank in zip(plan.stages, ranks, strict=True)
    ]
    peak_at = len(formats) - len(PARTS)
    texts = [
        (
            kind,
            *(shown(each) for shown, each in zip(formats[: peak_at + 1], row, strict=False)),
            *amount.adding_up(row[peak_at + 1 :]),  # their sum is the peak before them
        )
        for kind, row in zip(kinds, values, strict=True)
    ]
    runs = [[*run] for _, run in groupby(range(len(texts)), key=texts.__getitem__)]

    def row(stages: Sequence[int]) -> tuple[str, ...]:
        place = [] if alone else [ranges(sorted({ranks[stage] for stage in stages}))]
        kind = [" / ".join(dict.fromkeys(kinds[stage] for stage in stages))] if any(kinds) else []
        if len({texts[stage] for stage in stages}) == 1:
            return (ranges(stages), *place, *kind, *texts[stages[0]][1:])
        columns = zip(formats, zip(*(values[stage] for stage in stages), strict=True), strict=True)
        return (ranges(stages), *place, *kind, *(_span(shown, each) for shown, each in columns))

    shown = range(len(runs)) if all_of_them else _chosen(plan, runs)
    groups = list(_with_those_between(runs, shown))
    names = ("stage", *([] if alone else ["rank"]), *(["device"] if any(kinds) else []))
    table = Table(
        (*names, "forward", "backward", "bubble", *PARTS),
        tuple(row(stages) for stages, _ in groups),
        splits=len(names) + 4,
        left=("rank", "device"),
    )
    folded = sum(len(stages) for stages, between in groups if between)
    return Figures(table, len(names) + 4, amount.unit, folded)


def _with_those_between(
    runs: Sequence[Sequence[int]], shown: Sequence[int]
) -> Iterator[tuple[Sequence[int], bool]]:
    """The stages of each row: a run that is shown, or (True) all runs between two such runs."""
    before = -1
    for index in shown:
        between = [stage for run in runs[before + 1 : index] for stage in run]
        if between:
            yield between, True
        yield runs[index], False
        before = index


def _span(shown: Callable[[Any], str], values: Sequence[float]) -> str:
    """`24.5 ms`, or from the least to the most: `24.5-25.1 ms`."""
    least, most = shown(min(values)), shown(max(values))
    number, _, unit = least.partition(" ")
    if least == most:
        return most
    return f"{number if unit and most.endswith(unit) else least}-{most}"


def _chosen(plan: Plan, runs: Sequence[Sequence[int]]) -> Sequence[int]:
    """The runs of stages that a screen has room for."""
    if len(runs) <= MOST_ROWS:
        return range(len(runs))
    of = {stage: index for index, run in enumerate(runs) for stage in run}
    predicted = [stage.predicted for stage in plan.stages]
    pace = [found.forward_seconds + found.backward_seconds for found in predicted]
    slowest = max(range(len(pace)), key=pace.__getitem__)
    stage = max(range(len(pace)), key=lambda index: predicted[index].memory.peak)
    return sorted({0, of[slowest], of[stage], len(runs) - 1})


def _kinds(plan: Plan, ranks: Sequence[int]) -> list[str]:
    """Each stage's devices, `2 x A100-40GB`; empty where all devices are of one kind."""
    if len({device.kind for device in plan.cluster.devices}) == 1:
        return [""] * len(ranks)
    mesh, numbered = plan.mesh, predict.devices(plan)
    found = []
    for rank in ranks:
        own = numbered[mesh.rank(rank, 0) : mesh.rank(rank + 1, 0)]
        kinds = [plan.cluster.device_at(device)[2].kind for device in own]
        found.append(" + ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))
    return found


def legend(plan: Plan, unit: str, *, parts: bool = True) -> dict[str, str]:
    """The meanings of the columns of `figures`; `parts`: also of those that make up the peak."""
    peak = "a device's fullest moment"
    if parts:
        peak += ", the sum of the columns after it"
    else:
        peak += "; --stages shows what it is made up of"
    words = {
        "forward, backward": "of one micro-batch",
        "bubble": "share of a step in which the device does not compute",
        f"peak, in {unit}": peak,
    }
    if len(plan.stages) > plan.mesh.pp:
        words["rank"] = "a device; it holds the sum of its stages' bytes"
    return words


def margins(plan: Plan) -> str | None:
    """The bytes of the devices that tensors may fill, and why not all of them."""
    rooms = {d.kind: d.memory for d in plan.cluster.devices if d.is_gpu}
    if not rooms:
        return None
    listed = ", ".join(f"{numbers.memory(room)} of {kind}" for kind, room in rooms.items())
    margin = "the rest is a margin for CUDA's context and what the allocator loses"
    return f"tensors may fill {listed}; {margin}"


def compare(
    planned: Sequence[StagePrediction],
    measured: Sequence[StagePrediction],
    planned_step: float,
    measured_step: float,
    bubbles: Sequence[float] = (),
    columns: int = paper.WIDTH,
) -> str:
    """A table of the stages, then the step, as lines of at most `columns` columns.

    Args:
        planned_step, measured_step: seconds.
        bubbles: for each stage, the measured share of the step in which its device is idle.
    """
    amount = numbers.Amount(max(stage.memory.seen for stage in (*planned, *measured)))
    parts = [attrgetter(part) for part in ("seen", "activations", "transfers")]
    rows = []
    for index, (before, after) in enumerate(zip(planned, measured, strict=True)):
        rows.append(
            (
                str(index),
                _both(before.forward_seconds, after.forward_seconds),
                _both(before.backward_seconds, after.backward_seconds),
                *(f"{amount(p(before.memory))} / {amount(p(after.memory))}" for p in parts),
                *(numbers.percent(bubble) for bubble in bubbles[index : index + 1]),
            )
        )
    names = ("stage", "forward", "backward", "peak", "activations", "transfers")
    table = paper.Table((*names, *(["bubble"] if bubbles else [])), tuple(rows), splits=3)
    meanings = {
        "forward, backward": "seconds of one micro-batch",
        f"peak ({amount.unit})": "bytes at the device's fullest moment, of which activations and "
        "transfers are parts; without gradients on their way, which a run does not see",
    }
    if bubbles:
        meanings["bubble"] = "share of a step in which the device did not compute, as measured"
    step = f"a step, before the optimizer's: {_both(planned_step, measured_step)}"
    return (
        f"planned / measured\n\n{paper.table(table, columns)}\n{paper.legend(meanings, columns)}\n"
        f"{step}\n"
    )


def _both(planned: float, measured: float) -> str:
    return f"{numbers.seconds(planned)} / {numbers.seconds(measured)}"
