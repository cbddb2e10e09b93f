"""A plan as a person reads it: stages as a table, one step as a timeline, and why this plan."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.plan import Memory, Plan, StagePrediction
from autopipe.schedule import SCHEDULES, draw

WIDTH = 96
"""Columns that a timeline may take."""


def explain(plan: Plan) -> RenderableType:
    """The whole plan."""
    mesh, batch = plan.mesh, plan.batch
    rows = batch.rows // (mesh.dp * batch.micro_batches)
    head = (
        f"pp={mesh.pp} x dp={mesh.dp} x tp={mesh.tp} on {plan.cluster.name}, {plan.schedule}: "
        f"{batch.rows} rows a step, {batch.micro_batches} micro-batches of {rows} "
        f"row{'s' if rows > 1 else ''} on each of {mesh.dp} replica{'s' if mesh.dp > 1 else ''}"
    )
    step = (
        f"predicted step {_ms(plan.prediction.step_seconds)}, bubble {plan.prediction.bubble:.0%}"
    )
    return Group(
        Text(head),
        Text(step),
        Text(),
        _stages(plan),
        *_timeline(plan),
        *_transfers(plan),
        *_why(plan),
    )


def _stages(plan: Plan) -> Table:
    table = Table(box=SIMPLE_HEAD, title="stages", title_justify="left", pad_edge=False)
    for name in ("stage", "from", "to"):
        table.add_column(name, overflow="fold")
    for name in (
        "nodes",
        "params",
        "fwd",
        "bwd",
        "peak",
        "weights",
        "grads",
        "optim",
        "acts",
        "comm",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for index, stage in enumerate(plan.stages):
        memory = stage.predicted.memory
        table.add_row(
            str(index),
            stage.first,
            stage.last,
            str(stage.nodes),
            str(len(stage.parameters)),
            _ms(stage.predicted.forward_seconds),
            _ms(stage.predicted.backward_seconds),
            mib(memory.peak),
            mib(memory.parameters + memory.buffers),
            mib(memory.gradients),
            mib(memory.optimizer),
            mib(memory.activations),
            mib(memory.transfers),
        )
    return table


def _timeline(plan: Plan) -> list[Text]:
    """One step's forwards and backwards to scale, transfers taken as free."""
    forward = [stage.predicted.forward_seconds for stage in plan.stages]
    backward = [stage.predicted.backward_seconds for stage in plan.stages]
    # Enough to see the warm-up, the steady state and the cool-down.
    shown = min(plan.batch.micro_batches, 2 * plan.mesh.pp + 2)
    programs = SCHEDULES[plan.schedule](plan.mesh.pp, shown)
    if not min(forward + backward) > 0:
        return []
    picture = draw(programs, forward, backward, unit=min(forward + backward))
    if max(map(len, picture.splitlines())) > WIDTH:
        picture = draw(
            programs, forward, backward, unit=sum(forward + backward) / (3 * plan.mesh.pp)
        )
    rest = plan.batch.micro_batches - shown
    title = "one step, F forward and B backward" + (
        f" ({shown} of {plan.batch.micro_batches} micro-batches)" if rest else ""
    )
    return [Text(title), *(Text(line, no_wrap=True) for line in picture.splitlines()), Text()]


def _transfers(plan: Plan) -> list[Text]:
    lines = []
    for index, stage in enumerate(plan.stages):
        for sent in stage.sends:
            back = ", gradient back" if sent.gradient else ""
            shape = ", ".join(map(str, sent.shape))
            lines.append(
                Text(f"stage {index} -> {sent.peer}: {sent.name} {sent.dtype}[{shape}]{back}")
            )
    return [*lines, Text()] if lines else []


def _why(plan: Plan) -> list[Text]:
    note = plan.planner
    lines = [
        f"why: {note.binding}",
        f"planner {note.name}, no plan can take less than {_ms(note.bound_seconds)} a step",
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
) -> Table:
    """Planned beside measured: seconds of a micro-batch, peak bytes, and the step."""
    table = Table(box=SIMPLE_HEAD, title="planned / measured", title_justify="left", pad_edge=False)
    table.add_column("stage")
    for name in ("forward", "backward", "peak", "of it activations", "transfers"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, (before, after) in enumerate(zip(planned, measured, strict=True)):
        table.add_row(
            str(index),
            f"{_ms(before.forward_seconds)} / {_ms(after.forward_seconds)}",
            f"{_ms(before.backward_seconds)} / {_ms(after.backward_seconds)}",
            _pair(before.memory, after.memory, "peak"),
            _pair(before.memory, after.memory, "activations"),
            _pair(before.memory, after.memory, "transfers"),
        )
    table.add_section()
    table.add_row("step", f"{_ms(planned_step)} / {_ms(measured_step)}")
    return table


def _pair(before: Memory, after: Memory, part: str) -> str:
    return f"{mib(getattr(before, part))} / {mib(getattr(after, part))}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def mib(size: int) -> str:
    """Bytes for a person: MiB, or GiB from one on."""
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"


def console() -> Console:
    """Where data goes: stdout, as wide as its tables where it is no terminal."""
    found = Console(highlight=False, soft_wrap=False)
    return found if found.is_terminal else Console(highlight=False, width=140)
