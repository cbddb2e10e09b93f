"""Two plans compared: whether they train the same thing, and how they differ in doing so.

what    the model's graph, its rows a step, precision, optimizer, loss
how     cuts, degrees, schedule, micro-batches, ZeRO, recomputation, seconds, bytes
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from autopipe.planfile.again import folded, offloaded, repeated
from autopipe.planfile.contents import MICRO_BATCH, Plan
from autopipe.util import numbers

Value = int | float | str | tuple[str, ...] | None


@dataclass(frozen=True)
class Entry:
    """One property in which plans may differ, with both values.

    Attributes:
        name: the property's name for programs, in the words of `autopipe plan`.
        first, second: its value in each plan, for programs; times are seconds, sizes are bytes.
        label: the property's name for people.
        shown: both values for people.
    """

    name: str
    first: Value
    second: Value
    label: str
    shown: tuple[str, str]


@dataclass(frozen=True)
class Difference:
    """The differences between two plans; empty if they are the same.

    Attributes:
        what: the differing properties of what is trained.
        how: the differing properties of how it is trained.
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
        if first == second:
            continue
        if one == other and isinstance(first, tuple) and isinstance(second, tuple):
            # Both lists are equally long: show the entries that differ.
            one, other = _apart(first, second), _apart(second, first)
        yield Entry(name, first, second, _LABELS.get(name, name), (one, other))


_LABELS = {
    "loss over": "what the loss is a mean over",
    "grad_dtype": "dtype of gradients' sums",
    "optimizer_dtype": "dtype of what the optimizer changes",
    "products": "dtype of matrix products",
    "pp": "pipeline stages (pp)",
    "dp": "replicas (dp)",
    "tp": "tensor parts (tp)",
    "places (node.device)": "devices of the ranks",
    "programs": "schedule's written programs",
    "windows": "receives posted ahead (window)",
    "depths": "in flight beyond 1f1b's (depth)",
    "ZeRO": "sharded over replicas (ZeRO)",
    "loss parts": "loss computed from the vocabulary",
    "tensor states": "tensors sharded by tp",
    "compiled": "stages compiled",
    "recompute": "runs again in backward (recompute)",
    "offload": "kept in the host's memory (offload)",
}
"""Labels for people, by the name of the plan's field."""

_DEALT_OUT = {
    0: "0: nothing",
    1: "1: optimizer state",
    2: "2: gradients too",
    3: "3: parameters too",
}


def _apart(own: tuple[str, ...], others: tuple[str, ...]) -> str:
    """The entries that only `own` has; all its entries if both have the same in another order."""
    known = set(others)
    return ", ".join([each for each in own if each not in known] or own)


def _what(plan: Plan) -> Iterator[_Said]:
    """The properties that decide a step's results, up to the order of sums."""
    inputs = tuple(f"{leaf.path}: {leaf.dtype}{[*leaf.shape]}" for leaf in plan.inputs)
    yield "model", plan.fingerprint, f"{plan.fingerprint[:12]} ({plan.source})"
    yield "inputs", inputs, ", ".join(inputs)
    yield "batch", plan.batch.rows, numbers.count(plan.batch.rows, "row")
    yield from _texts(plan, "precision", "grad_dtype", "optimizer_dtype", "optimizer")
    yield "products", plan.products, ", ".join(plan.products)
    yield "loss over", plan.loss_over, plan.loss_over
    loss = {None: "not said", True: "a function of its own", False: "the model's output"}
    yield "loss", loss[plan.loss], loss[plan.loss]
    # A mean of micro-batches' own losses depends on how rows are grouped into micro-batches.
    parts = plan.mesh.dp * plan.batch.micro_batches if plan.loss_over == MICRO_BATCH else 1
    yield "micro-batches of a step", parts, str(parts)


def _how(plan: Plan) -> Iterator[_Said]:
    mesh, batch, prediction = plan.mesh, plan.batch, plan.prediction
    yield "cluster", plan.cluster.name, plan.cluster.name
    for name, value in (("pp", mesh.pp), ("dp", mesh.dp), ("tp", mesh.tp)):
        yield name, value, str(value)
    places = tuple(f"{place.node}.{place.local}" for place in mesh.places)
    yield "places (node.device)", places, _folded_places(plan)
    cuts = tuple(stage.first for stage in plan.stages)
    yield "stages begin at", cuts, ", ".join(cuts)
    yield from _texts(plan, "schedule")
    yield "programs", plan.programs, numbers.count(len(plan.programs), "written program")
    rows = numbers.count(batch.microbatch_rows(mesh.dp), "row")
    yield "micro-batches", batch.micro_batches, f"{batch.micro_batches} of {rows}"
    for word in ("window", "depth"):
        found = tuple(str(getattr(boundary, word)) for boundary in plan.boundaries)
        yield f"{word}s", found, _between(found)
    yield "ZeRO", plan.zero, _DEALT_OUT[plan.zero]
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
    parts_of_loss = f"in {plan.loss_parts} parts" if plan.loss_parts else "all at once"
    yield "loss parts", plan.loss_parts, parts_of_loss
    yield "fused attention", plan.fused_attention, "yes" if plan.fused_attention else "no"
    yield "compiled", str(plan.compiled), "yes" if plan.compiled else "no"
    tensors = tuple(
        f"{place}{state.name} {state.state}"
        for place, states in [("", plan.states), *((f"{b.name}: ", b.states) for b in plan.blocks)]
        for state in states
    )
    yield "tensor states", tensors, numbers.count(len(tensors), "tensor") if tensors else "none"
    yield "predicted step", prediction.step_seconds, numbers.seconds(prediction.step_seconds)
    yield "predicted bubble", prediction.bubble, numbers.percent(prediction.bubble)
    peak = max(stage.predicted.memory.peak for stage in plan.stages)
    yield "predicted bytes of the fullest stage", peak, numbers.memory(peak)


def _between(found: tuple[str, ...]) -> str:
    """The values at the boundaries between stages; a single one if all are equal."""
    if not found:
        return "one stage alone"
    if len(set(found)) > 1:
        return ", ".join(found)
    return f"{found[0]}, at each of {len(found)} cuts" if len(found) > 1 else found[0]


def _folded_places(plan: Plan) -> str:
    """The devices of each node in the order of ranks; equal nodes together: `nodes 0-1: 0-7`."""
    on: dict[int, list[int]] = {}
    for place in plan.mesh.places:
        on.setdefault(place.node, []).append(place.local)
    rows = groupby(on.items(), key=lambda entry: entry[1])
    return "; ".join(
        f"node{'s' if len(nodes) > 1 else ''} {numbers.ranges(nodes)}: {_devices(own)}"
        for own, entries in rows
        for nodes in [[node for node, _ in entries]]
    )


def _devices(own: list[int]) -> str:
    return numbers.ranges(own) if own == sorted(own) else ", ".join(map(str, own))


def _texts(plan: Plan, *names: str) -> Iterator[_Said]:
    for name in names:
        yield name, getattr(plan, name), str(getattr(plan, name))
