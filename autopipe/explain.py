"""A plan as a person reads it: stages as a table, one step as a timeline, and why this plan.

Every line fits 100 columns; names of nodes, which may be long, stand on lines of their own.
"""

from __future__ import annotations

import html
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import StringIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopipe import forecast, programs, schedule, sketch
from autopipe.megatron import describe
from autopipe.picture import svg
from autopipe.plan import (
    Alternative,
    Batch,
    Memory,
    Plan,
    StagePlan,
    StagePrediction,
    Transfer,
    data_parallel,
)
from autopipe.traffic import traffic

WIDTH = 100
"""Columns of a page; a terminal may have more."""

_PARTS: Mapping[str, Callable[[Memory], int]] = {
    "peak": lambda memory: memory.peak,
    "weights": lambda memory: memory.parameters + memory.buffers,
    "grads": lambda memory: memory.gradients,
    "optimizer": lambda memory: memory.optimizer,
    "activations": lambda memory: memory.activations,
    "transfers": lambda memory: memory.transfers + memory.passing,
}


def explain(plan: Plan) -> RenderableType:
    """The whole plan."""
    mesh, batch = plan.mesh, plan.batch
    rows = batch.rows // (mesh.dp * batch.micro_batches)
    parts = count(batch.micro_batches, "micro-batch", "micro-batches")
    pipeline = count(len(plan.stages), "pipeline stage")
    if len(plan.stages) > mesh.pp:
        pipeline += f" on {count(mesh.pp, 'rank')}"
    head = [
        f"{plan.schedule} on {plan.cluster.name}: {pipeline} (pp) x "
        f"{count(mesh.dp, 'replica')} (dp) x {count(mesh.tp, 'tensor part')} (tp)",
        f"one step: {count(batch.rows, 'row')}, {parts} of b = {count(rows, 'row')} on each "
        "replica",
        *_asked(plan),
        f"predicted: {seconds(plan.prediction.step_seconds)} a step, of which a rank idles "
        f"{plan.prediction.bubble:.0%} (the bubble)\n",
    ]
    return Group(
        Text("\n".join(head)),
        *_table_of(plan),
        *_nodes(plan),
        *[Text(line) for line in describe(plan)],
        Text(),
        *_timeline(plan),
        *_traffic(plan),
        *_why(plan),
    )


def _asked(plan: Plan) -> list[str]:
    """What is not as usual."""
    lines = []
    if plan.precision != "fp32":
        lines.append(f"precision: {plan.precision} in matrix products, fp32 in all that is kept")
    if plan.zero and plan.mesh.dp > 1:
        dealt = {1: "optimizer state is", 3: "parameters, gradients and optimizer state are"}
        lines.append(f"zero: {plan.zero}, {dealt[plan.zero]} dealt out over the replicas")
    again = {block for stage in plan.stages for block in stage.recompute}
    if again:
        lines.append(f"recompute: {count(len(again), 'block')}, a second time in backward")
    if any(boundary.depth for boundary in plan.boundaries):
        windows = _each([boundary.window for boundary in plan.boundaries])
        depths = _each([boundary.depth for boundary in plan.boundaries])
        lines.append(
            f"boundaries: {windows} receives posted ahead, {depths} more micro-batches in flight"
        )
    return lines


def _each(numbers: Sequence[int]) -> str:
    """`2`, or `2 2 1` where they differ."""
    return " ".join(map(str, numbers if len(set(numbers)) > 1 else numbers[:1]))


def _table_of(plan: Plan) -> list[RenderableType]:
    """Of each stage the seconds and the bytes."""
    memories = [stage.predicted.memory for stage in plan.stages]
    unit, size = _unit(memories)
    ranks = _ranks(plan)
    bubbles = forecast.timeline(plan).bubbles
    table = _table("stage", "forward", "backward", "bubble", *_PARTS)
    for index, stage in enumerate(plan.stages):
        table.add_row(
            f"{index}, rank {ranks[index]}" if ranks else str(index),
            seconds(stage.predicted.forward_seconds),
            seconds(stage.predicted.backward_seconds),
            f"{bubbles[ranks[index] if ranks else index]:.0%}",
            *(f"{part(memories[index]) / size:.1f}" for part in _PARTS.values()),
        )
    legend = (
        "peak is the sum of what stands right of it: weights (with buffers), their gradients, the\n"
        "optimizer's state, activations kept from forward to backward, buffers of transfers (with\n"
        "those of gradients on their way into a sum)\n"
    )
    legend += _rooms(plan)
    if ranks:
        held = [0] * plan.mesh.pp
        for rank, memory in zip(ranks, memories, strict=True):
            held[rank] += memory.peak
        sums = ", ".join(f"{peak / size:.1f} on rank {rank}" for rank, peak in enumerate(held))
        legend += f"at the fullest moment of the rank, whose stages hold together {sums}\n"
    return [
        Text(f"predicted: one micro-batch's forward and backward; a device's memory in {unit}\n"),
        table,
        Text(legend),
    ]


def _rooms(plan: Plan) -> str:
    """What tensors may fill of the devices."""
    rooms = {device.kind: device.memory for device in plan.cluster.devices if device.kind != "cpu"}
    said = ""
    if rooms:
        listed = ", ".join(f"{room / 2**30:.1f} GiB of {kind}" for kind, room in rooms.items())
        margin = "the rest is a margin for CUDA's context and what the allocator loses"
        said = textwrap.fill(f"tensors may fill {listed}; {margin}", WIDTH) + "\n"
    if plan.planner.limits:
        limits = ", ".join(f"{limit / 2**20:,.0f} MiB" for limit in plan.planner.limits)
        said += textwrap.fill(f"no more than was asked for: {limits}", WIDTH) + "\n"
    return said


def _ranks(plan: Plan) -> tuple[int, ...]:
    """The rank of each stage, where that is not its number."""
    alone = len(plan.stages) == plan.mesh.pp
    return () if alone else schedule.holders(programs.compute(plan))


def _nodes(plan: Plan) -> list[Text]:
    ranks = _ranks(plan)
    placed = schedule.holders(programs.compute(plan))
    names = [
        f"stage {index}{f' on rank {ranks[index]}' if ranks else ''}"
        for index in range(len(plan.stages))
    ]
    if len({device.kind for device in plan.cluster.devices}) > 1:
        names = [f"{name}, on {_devices(plan, pp)}" for name, pp in zip(names, placed, strict=True)]
    return [_stage(name, stage) for name, stage in zip(names, plan.stages, strict=True)]


def _devices(plan: Plan, pp: int) -> str:
    """`2 x A100-40GB`."""
    mesh, devices = plan.mesh, forecast.devices(plan)
    own = devices[mesh.rank(pp, 0) : mesh.rank(pp + 1, 0)]
    kinds = Counter(plan.cluster.device_at(device)[2].kind for device in own)
    return " and ".join(f"{number} x {kind}" for kind, number in kinds.items())


def _stage(name: str, stage: StagePlan) -> Text:
    """Which nodes a stage holds, and what it sends on."""
    lines = [
        f"{name}: {count(stage.nodes, 'node')}, {count(len(stage.parameters), 'parameter tensor')}",
        f"  from {stage.first}",
        f"  to   {stage.last}",
        *(f"  {_sent(transfer)}" for transfer in stage.sends),
    ]
    if stage.recompute:
        lines.append(f"  recomputed in backward: {', '.join(stage.recompute)}")
    return Text("\n".join(lines), overflow="fold")


def _sent(sent: Transfer) -> str:
    shape = ", ".join(map(str, sent.shape))
    back = ", its gradient comes back" if sent.gradient else ""
    what = f"{sent.dtype}[{shape}] to stage {sent.peer}{back}"
    line = f"sends {sent.name} {what}"
    return line if len(line) + 2 <= WIDTH else f"sends {sent.name}\n    {what}"


def _timeline(plan: Plan) -> list[Text]:
    """One step as it is predicted, to scale."""
    predicted = [stage.predicted for stage in plan.stages]
    if not all(min(s.forward_seconds, s.backward_seconds) > 0 for s in predicted):
        return []
    total = plan.batch.micro_batches
    found = _drawing(plan)
    if found is None:
        return []
    shown, picture = found
    backward, notes = "B", []
    if schedule.splits(programs.compute(plan)):
        backward = "I, W"
        notes.append("I is backward for inputs, W for weights")
    chunks = len(plan.stages) // plan.mesh.pp
    if chunks > 1:
        second = "lower case is a rank's second stage"
        notes.append(second if chunks == 2 else "what stands in front is the stage")
    of = f", {shown} of {total} micro-batches" if shown < total else ""
    lines = [
        f"one step of a pipeline: F forward, {backward} backward, numbered by micro-batch{of}",
        *(["; ".join(notes)] if notes else []),
        *picture.splitlines(),
    ]
    return [*(Text(line, no_wrap=True) for line in lines), Text()]


def _drawing(plan: Plan) -> tuple[int, str] | None:
    """How many micro-batches fit the page, and their picture.

    Enough to see the warm-up, the steady state and the cool-down. Where that is too much there are
    fewer; where it would be too few, labels are cut.
    """
    total = plan.batch.micro_batches
    rows = plan.batch.rows // total
    most, few = min(total, 2 * plan.mesh.pp + 2), min(total, 3)
    if plan.programs:  # a written schedule is for its own number of micro-batches
        most = few = total
    timelines = {
        shown: forecast.timeline(replace(plan, batch=Batch(rows * shown, shown)))
        for shown in range(most, 0 if few < total else few - 1, -1)
    }
    for labels, fewest in ((1, few), (2, few), (None, 1)):
        for shown, timeline in timelines.items():
            if shown < fewest:
                continue
            unit = 5 * timeline.seconds / WIDTH
            if labels is not None:
                unit = labels * sketch.shortest(timeline)
            picture = sketch.fitting(timeline, unit, WIDTH)
            if picture is not None:
                return shown, picture
    return None


def _traffic(plan: Plan) -> list[Text]:
    """What goes over the farthest links, beside what would if gradients were summed there."""
    found = traffic(plan)
    if found is None:
        return []
    parts = []
    if found.activations:
        between = ", ".join(f"{one} and {other}" for one, other in found.pairs)
        parts.append(
            f"{gigabytes(found.activations)} of activations and {gigabytes(found.gradients)} of "
            f"their gradients, between stages {between}; the busiest wire carries them for "
            f"{seconds(found.busy)}"
        )
    if found.sums:
        parts.append(f"{gigabytes(found.sums)} to sum the gradients of parameters")
    else:
        parts.append(
            f"summing the gradients of all parameters there would send "
            f"{gigabytes(found.sum_of_all)}"
        )
    line = f"a step sends between {found.places} {found.kind} ({found.link}): {'; '.join(parts)}"
    return [Text(line, overflow="fold"), Text()]


def _why(plan: Plan) -> list[Text]:
    note = plan.planner
    lines = [f"why: {note.binding}"]
    step, bound = plan.prediction.step_seconds, note.bound_seconds
    lines.append(
        f"planner {note.name}: by its own, rougher estimate this plan takes "
        f"{seconds(note.step_seconds)} a step and none less than {seconds(bound)}, a gap of "
        f"{max(0.0, note.step_seconds / bound - 1) if bound else 0:.1%}; the longest path through "
        f"its programs says {seconds(step)}"
    )
    if note.alternatives:
        lines.append("why not another mesh, the nearest first:")
        alone = data_parallel(note.alternatives)
        if plan.mesh.pp == plan.mesh.tp == 1:
            alone = None  # the plan itself is of that kind
        for other in note.alternatives:
            plain = other == alone
            lines.append(f"  {'data parallelism alone: ' if plain else ''}{_other(other)}")
    return [Text(line, overflow="fold") for line in lines]


def _other(other: Alternative) -> str:
    """`pp=4 dp=2 tp=1, 8 micro-batches, 1f1b: 2.05 s, 3.0 % slower, by transfers`."""
    zero = f" zero={other.zero}" if other.zero else ""
    step = "" if other.step_seconds is None else f"{seconds(other.step_seconds)}, "
    return (
        f"pp={other.pp} dp={other.dp} tp={other.tp}{zero}, "
        f"{count(other.micro_batches, 'micro-batch', 'micro-batches')}, {other.schedule}: "
        f"{step}{other.why}"
    )


def compare(
    planned: Sequence[StagePrediction],
    measured: Sequence[StagePrediction],
    planned_step: float,
    measured_step: float,
    bubbles: Sequence[float] = (),
) -> RenderableType:
    """Planned beside measured: seconds of a micro-batch, peak bytes, and the step.

    Args:
        bubbles: the share of a step that each stage's device was measured not to compute, if any.
    """
    unit, size = _unit([stage.memory for stage in (*planned, *measured)])
    names = ("stage", "forward", "backward", "peak", "activations", "transfers")
    table = _table(*names, *(["bubble"] if bubbles else []))
    for index, (before, after) in enumerate(zip(planned, measured, strict=True)):
        parts = (_PARTS[name] for name in ("peak", "activations", "transfers"))
        table.add_row(
            str(index),
            f"{seconds(before.forward_seconds)} / {seconds(after.forward_seconds)}",
            f"{seconds(before.backward_seconds)} / {seconds(after.backward_seconds)}",
            *(f"{p(before.memory) / size:.1f} / {p(after.memory) / size:.1f}" for p in parts),
            *(f"{bubble:.0%}" for bubble in bubbles[index : index + 1]),
        )
    title = (
        "planned / measured: one micro-batch's forward and backward; a device's memory in "
        f"{unit},\nof whose peak activations and transfers are parts\n"
    )
    step = f"a step, before the optimizer's: {seconds(planned_step)} / {seconds(measured_step)}"
    return Group(Text(title), table, Text(step))


def _table(*names: str) -> Table:
    """An empty table: names on the left, figures on the right; with all of them it fits a page."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0, 0, 1))
    for name in names:
        table.add_column(name, justify="left" if name == "stage" else "right", no_wrap=True)
    return table


def _unit(memories: Sequence[Memory]) -> tuple[str, int]:
    """The unit in which the largest of the peaks reads well, and its bytes."""
    largest = max(memory.peak for memory in memories)
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    fitting = [name for name, size in units.items() if size <= largest] or ["KiB"]
    return fitting[-1], units[fitting[-1]]


def seconds(time: float) -> str:
    """Seconds for a person: 263 us, 1.5 ms, 2.34 s."""
    if time < 1e-3:
        return f"{time * 1e6:.0f} us"
    return f"{time * 1e3:.1f} ms" if time < 1 else f"{time:.2f} s"


def gigabytes(size: float) -> str:
    """As links are measured: 4.3 GB, 350 MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def count(number: int, one: str, many: str | None = None) -> str:
    """1 row, 2 rows."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def page(plan: Plan, title: str) -> str:
    """The whole plan as one HTML file: the step as a picture, and below it what `explain` says."""
    recorded = Console(record=True, width=WIDTH, file=StringIO(), highlight=False)
    recorded.print(explain(plan))
    text = recorded.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    return _PAGE.format(
        title=html.escape(title), picture=svg(forecast.timeline(plan), title), text=text
    )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 2em auto; max-width: 1240px; color: #24292f }}
pre {{ font-family: ui-monospace, monospace; line-height: 1.35; overflow-x: auto }}
</style></head>
<body>
{picture}
{text}
</body>
</html>
"""


def console() -> Console:
    """Where data goes: stdout, never narrower than a page."""
    found = Console(highlight=False)
    return Console(highlight=False, width=max(WIDTH, found.width if found.is_terminal else 0))
