"""Two plans compared: whether they train the same thing, and how they differ in doing so.

what    the model's graph, its rows a step, precision, optimizer, loss
how     cuts, degrees, schedule, micro-batches, ZeRO, recomputation, seconds, bytes
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopipe.planfile.again import folded, offloaded, repeated
from autopipe.planfile.contents import MICRO_BATCH, Plan
from autopipe.util import numbers

Value = int | float | str | tuple[str, ...] | None


@dataclass(frozen=True)
class Entry:
    """One thing in which plans may differ, with both values.

    Attributes:
        name: in the words of `autopipe plan`.
        first, second: as numbers and texts; seconds and bytes.
        shown: both, as people read them.
    """

    name: str
    first: Value
    second: Value
    shown: tuple[str, str]


@dataclass(frozen=True)
class Difference:
    """What differs between two plans; nothing where they are the same.

    Attributes:
        what: of what is trained.
        how: of how.
    """

    what: tuple[Entry, ...]
    how: tuple[Entry, ...]

    @property
    def same_training(self) -> bool:
        """Whether a step of both computes the same loss and the same update."""
        return not self.what

    @property
    def none(self) -> bool:
        """Whether the plans are the same in all that is compared."""
        return not self.what and not self.how


def compare(first: Plan, second: Plan) -> Difference:
    """Compare two plans."""
    whats = zip(_what(first), _what(second), strict=True)
    hows = zip(_how(first), _how(second), strict=True)
    return Difference(tuple(_differing(whats)), tuple(_differing(hows)))


_Said = tuple[str, Value, str]
"""A name, a value, and the value as people read it."""


def _differing(pairs: Iterator[tuple[_Said, _Said]]) -> Iterator[Entry]:
    for (name, first, one), (_, second, other) in pairs:
        if first != second:
            yield Entry(name, first, second, (one, other))


def _what(plan: Plan) -> Iterator[_Said]:
    """What decides the numbers of a step, but for the order of sums."""
    inputs = tuple(f"{leaf.path}: {leaf.dtype}{[*leaf.shape]}" for leaf in plan.inputs)
    yield "model", plan.fingerprint, f"{plan.fingerprint[:12]} ({plan.source})"
    yield "inputs", inputs, ", ".join(inputs)
    yield "batch", plan.batch.rows, numbers.count(plan.batch.rows, "row")
    yield from _texts(plan, "precision", "grad_dtype", "optimizer_dtype", "optimizer")
    yield "products", plan.products, ", ".join(plan.products)
    yield "loss over", plan.loss_over, plan.loss_over
    loss = {None: "not said", True: "a function of its own", False: "the model's output"}
    yield "loss", loss[plan.loss], loss[plan.loss]
    # A mean of micro-batches' own losses is another one for other micro-batches.
    parts = plan.mesh.dp * plan.batch.micro_batches if plan.loss_over == MICRO_BATCH else 1
    yield "micro-batches of a step", parts, str(parts)


def _how(plan: Plan) -> Iterator[_Said]:
    mesh, batch, prediction = plan.mesh, plan.batch, plan.prediction
    yield "cluster", plan.cluster.name, plan.cluster.name
    for name, value in (("pp", mesh.pp), ("dp", mesh.dp), ("tp", mesh.tp)):
        yield name, value, str(value)
    places = tuple(f"{place.node}.{place.local}" for place in mesh.places)
    yield "places (node.device)", places, ", ".join(places)
    cuts = tuple(stage.first for stage in plan.stages)
    yield "stages begin at", cuts, ", ".join(cuts)
    yield from _texts(plan, "schedule")
    yield "programs", plan.programs, numbers.count(len(plan.programs), "written program")
    rows = batch.microbatch_rows(mesh.dp)
    yield "micro-batches", batch.micro_batches, f"{batch.micro_batches} of {rows} rows"
    for word in ("window", "depth"):
        found = tuple(str(getattr(boundary, word)) for boundary in plan.boundaries)
        yield f"{word}s", found, ", ".join(found)
    yield "ZeRO", plan.zero, str(plan.zero)
    again = tuple(block for stage in plan.stages for block in stage.recompute)
    said = "; ".join(own.where() for own in repeated(plan, plan.stages))
    yield "recompute", again, said or "nothing"
    yield "offload", offloaded(plan), folded(offloaded(plan)) or "nothing"
    parts = tuple(
        f"{sent.part_of.tensor}, dim {sent.part_of.dim}, to stage {sent.peer}"
        for stage in plan.stages
        for sent in stage.sends
        if sent.part_of is not None
    )
    yield "sent in parts", parts, numbers.count(len(parts), "tensor") if parts else "nothing"
    yield "loss parts", plan.loss_parts, str(plan.loss_parts)
    yield "fused attention", plan.fused_attention, "yes" if plan.fused_attention else "no"
    yield "compiled", str(plan.compiled), "yes" if plan.compiled else "no"
    tensors = tuple(
        f"{place}{state.name} {state.state}"
        for place, states in [("", plan.states), *((f"{b.name}: ", b.states) for b in plan.blocks)]
        for state in states
    )
    yield "tensor states", tensors, f"{numbers.count(len(tensors), 'tensor')} not replicated"
    yield "predicted step", prediction.step_seconds, numbers.seconds(prediction.step_seconds)
    yield "predicted bubble", prediction.bubble, numbers.percent(prediction.bubble)
    peak = max(stage.predicted.memory.peak for stage in plan.stages)
    yield "predicted bytes of the fullest stage", peak, numbers.memory(peak)


def _texts(plan: Plan, *names: str) -> Iterator[_Said]:
    for name in names:
        yield name, getattr(plan, name), str(getattr(plan, name))
