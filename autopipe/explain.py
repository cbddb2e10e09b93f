"""A plan as a person reads it: stages as a table, one step as a timeline, and why this plan.

Every line fits 100 columns; names of nodes, which may be long, stand on lines of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.plan import Memory, Plan, StagePlan, StagePrediction, Transfer
from autopipe.schedule import SCHEDULES, draw

WIDTH = 100
"""Columns of a page; a terminal may have more."""

_PARTS: Mapping[str, Callable[[Memory], int]] = {
    "peak": lambda memory: memory.peak,
    "weights": lambda memory: memory.parameters + memory.buffers,
    "gradients": lambda memory: memory.gradients,
    "optimizer": lambda memory: memory.optimizer,
    "activations": lambda memory: memory.activations,
    "transfers": lambda memory: memory.transfers,
}


def explain(plan: Plan) -> RenderableType:
    """The whole plan."""
    mesh, batch = plan.mesh, plan.batch
    rows = batch.rows // (mesh.dp * batch.micro_batches)
    parts = count(batch.micro_batches, "micro-batch", "micro-batches")
    head = (
        f"{plan.schedule} on {plan.cluster.name}: {count(mesh.pp, 'pipeline stage')} (pp) x "
        f"{count(mesh.dp, 'replica')} (dp) x {count(mesh.tp, 'tensor part')} (tp)\n"
        f"one step: {count(batch.rows, 'row')}, {parts} of b = {count(rows, 'row')} on each "
        "replica\n"
        f"predicted: {seconds(plan.prediction.step_seconds)} a step, of which a stage idles "
        f"{plan.prediction.bubble:.0%} (the bubble)\n"
    )
    stages = (_stage(index, stage) for index, stage in enumerate(plan.stages))
    return Group(Text(head), *_stages(plan), *stages, Text(), *_timeline(plan), *_why(plan))


def _stages(plan: Plan) -> list[RenderableType]:
    memories = [stage.predicted.memory for stage in plan.stages]
    unit, size = _unit(memories)
    table = _table("stage", "forward", "backward", *_PARTS)
    for index, stage in enumerate(plan.stages):
        table.add_row(
            str(index),
            seconds(stage.predicted.forward_seconds),
            seconds(stage.predicted.backward_seconds),
            *(f"{part(memories[index]) / size:.1f}" for part in _PARTS.values()),
        )
    legend = (
        "peak is the sum of what stands right of it: weights (with buffers), their gradients, the\n"
        "optimizer's state, activations kept from forward to backward, buffers of transfers\n"
    )
    return [
        Text(f"predicted: one micro-batch's forward and backward; a device's memory in {unit}\n"),
        table,
        Text(legend),
    ]


def _stage(index: int, stage: StagePlan) -> Text:
    """Which nodes a stage holds, and what it sends on."""
    lines = [
        f"stage {index}: {count(stage.nodes, 'node')}, "
        f"{count(len(stage.parameters), 'parameter tensor')}",
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
    return f"sends {sent.name} {sent.dtype}[{shape}] to stage {sent.peer}{back}"


def _timeline(plan: Plan) -> list[Text]:
    """One step's forwards and backwards to scale, transfers taken as free."""
    forward = [stage.predicted.forward_seconds for stage in plan.stages]
    backward = [stage.predicted.backward_seconds for stage in plan.stages]
    if not min(forward + backward) > 0:
        return []
    total, pp = plan.batch.micro_batches, plan.mesh.pp
    # Enough to see the warm-up, the steady state and the cool-down; less where the page is full.
    for shown in range(min(total, 2 * pp + 2), 0, -1):
        programs = SCHEDULES[plan.schedule](pp, shown)
        for unit in (min(forward + backward), sum(forward + backward) / (3 * pp)):
            picture = draw(programs, forward, backward, unit).splitlines()
            # What a rank is to a program is a stage to a plan: with replicas, several ranks.
            lines = [line.replace("rank", "stage", 1) for line in picture]
            if max(map(len, lines)) <= WIDTH:
                of = f", {shown} of {total} micro-batches" if shown < total else ""
                title = f"one step: F forward, B backward, numbered by micro-batch{of}"
                return [Text(title), *(Text(line, no_wrap=True) for line in lines), Text()]
    return []


def _why(plan: Plan) -> list[Text]:
    note = plan.planner
    lines = [
        f"why: {note.binding}",
        f"planner {note.name}: no plan can take less than {seconds(note.bound_seconds)} a step",
    ]
    if note.next_best is not None:
        other = note.next_best
        lines.append(
            f"next best: pp={other.pp} dp={other.dp} tp={other.tp} "
            f"micro_batches={other.micro_batches} {other.schedule}: {other.why}"
        )
    return [Text(line) for line in lines]


def compare(
    planned: Sequence[StagePrediction],
    measured: Sequence[StagePrediction],
    planned_step: float,
    measured_step: float,
) -> RenderableType:
    """Planned beside measured: seconds of a micro-batch, peak bytes, and the step."""
    unit, size = _unit([stage.memory for stage in (*planned, *measured)])
    table = _table("stage", "forward", "backward", "peak", "activations", "transfers")
    for index, (before, after) in enumerate(zip(planned, measured, strict=True)):
        parts = (_PARTS[name] for name in ("peak", "activations", "transfers"))
        table.add_row(
            str(index),
            f"{seconds(before.forward_seconds)} / {seconds(after.forward_seconds)}",
            f"{seconds(before.backward_seconds)} / {seconds(after.backward_seconds)}",
            *(f"{p(before.memory) / size:.1f} / {p(after.memory) / size:.1f}" for p in parts),
        )
    title = (
        "planned / measured: one micro-batch's forward and backward; a device's memory in "
        f"{unit},\nof whose peak activations and transfers are parts\n"
    )
    step = f"a step, before the optimizer's: {seconds(planned_step)} / {seconds(measured_step)}"
    return Group(Text(title), table, Text(step))


def _table(*names: str) -> Table:
    """An empty table: names on the left, figures on the right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
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


def count(number: int, one: str, many: str | None = None) -> str:
    """1 row, 2 rows."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def console() -> Console:
    """Where data goes: stdout, never narrower than a page."""
    found = Console(highlight=False)
    return Console(highlight=False, width=max(WIDTH, found.width if found.is_terminal else 0))
