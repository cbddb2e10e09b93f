"""Make a table of each stage's seconds and bytes, as texts.

stage  forward  backward  bubble   peak  weights ...       equal stages that follow each other
0      24.1 ms   48.2 ms    12 %  105.2     20.1           share a row
1-30   24.5 ms     49 ms   9.8 %   93.0     20.4
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopipe.planfile import predict, programs
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Memory
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

MOST_ROWS = 8
"""Rows of a table that fits a screen; of more stages those are shown that matter."""


@dataclass(frozen=True)
class Figures:
    """A table of the stages, with the unit of its bytes.

    Attributes:
        parts: the first column of those that make up the peak, which stands before it.
        unit: of bytes, `MiB`.
        hidden: how many stages the table leaves out.
    """

    table: Table
    parts: int
    unit: str
    hidden: int


def figures(plan: Plan, *, all_of_them: bool = False) -> Figures:
    """Make the table of each stage's seconds and bytes.

    Args:
        all_of_them: not only those that a screen has room for: the first, the slowest, the one
            that holds most, the last.
    """
    amount = Amount(max(stage.predicted.memory.peak for stage in plan.stages))
    ranks = holders(programs.compute(plan))
    bubbles = predict.timeline(plan).bubbles
    kinds = _kinds(plan, ranks)
    cells = []
    for stage, rank, kind in zip(plan.stages, ranks, kinds, strict=True):
        cells.append(
            (
                *([kind] if any(kinds) else []),
                numbers.seconds(stage.predicted.forward_seconds),
                numbers.seconds(stage.predicted.backward_seconds),
                percent(bubbles[rank]),
                *(amount(part(stage.predicted.memory)) for part in PARTS.values()),
            )
        )
    runs: list[list[int]] = []
    for index, row in enumerate(cells):
        if runs and cells[runs[-1][-1]] == row:
            runs[-1].append(index)
        else:
            runs.append([index])
    shown = range(len(runs)) if all_of_them else _chosen(plan, runs)
    alone = len(plan.stages) == plan.mesh.pp
    names = ("stage", *([] if alone else ["rank"]), *(["device"] if any(kinds) else []))
    rows, before = [], -1
    for index in shown:
        if index > before + 1:
            rows.append(_left_out(runs[before + 1 : index], len(names) - 1 + 3 + len(PARTS)))
        run, before = runs[index], index
        own = [] if alone else [ranges(sorted({ranks[stage] for stage in run}))]
        rows.append((ranges(run), *own, *cells[run[0]]))
    table = Table(
        (*names, "forward", "backward", "bubble", *PARTS),
        tuple(rows),
        splits=len(names) + 4,
        left=("rank", "device"),
    )
    hidden = sum(len(run) for run in runs) - sum(len(runs[index]) for index in shown)
    return Figures(table, len(names) + 4, amount.unit, hidden)


def _left_out(runs: Sequence[Sequence[int]], others: int) -> tuple[str, ...]:
    return (f"{runs[0][0]}-{runs[-1][-1]}", *("..." for _ in range(others)))


def _chosen(plan: Plan, runs: Sequence[Sequence[int]]) -> Sequence[int]:
    """The runs of stages that a screen has room for."""
    if len(runs) <= MOST_ROWS:
        return range(len(runs))
    of = {stage: index for index, run in enumerate(runs) for stage in run}
    predicted = [stage.predicted for stage in plan.stages]
    pace = [found.forward_seconds + found.backward_seconds for found in predicted]
    slowest = max(range(len(pace)), key=pace.__getitem__)
    stage = max(range(len(pace)), key=lambda index: predicted[index].memory.peak)
    last = len(runs) - 1
    return sorted({0, 1, of[slowest], of[stage], last - 1, last})


def _kinds(plan: Plan, ranks: Sequence[int]) -> list[str]:
    """Of each stage the devices that it is on, `2 x A100-40GB`, where not all are of one kind."""
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
        peak += (
            ": the sum of weights, their gradients (grads), the optimizer's state, activations "
            "kept from forward to backward, and transfers (buffers of what is on its way)"
        )
    else:
        peak += "; --stages shows what it is made up of"
    words = {
        "forward, backward": "of one micro-batch",
        "bubble": "the share of a step in which the device does not compute",
        f"peak, in {unit}": peak,
    }
    if len(plan.stages) > plan.mesh.pp:
        words["rank"] = "a device; what its stages hold is to be added up"
    return words


def margins(plan: Plan) -> str | None:
    """The bytes of the devices that tensors may fill, and why not all of them."""
    rooms = {d.kind: d.memory for d in plan.cluster.devices if d.kind != "cpu"}
    if not rooms:
        return None
    listed = ", ".join(f"{numbers.memory(room)} of {kind}" for kind, room in rooms.items())
    margin = "the rest is a margin for CUDA's context and what the allocator loses"
    return f"tensors may fill {listed}; {margin}"
