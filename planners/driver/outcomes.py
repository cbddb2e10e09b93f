"""What a run of a model leaves behind, and how that of its graph differs from it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopipe.errors import CaptureError
from autopipe.ir.graph import Graph, State
from autopipe.tracing.trace import Trace

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""How far a result may be off, as a share of its largest entry: sums in another order."""

FLOOR = 1e-3
"""A gradient is compared with its own largest entry, or with this share of the largest of all."""


@dataclass
class Outcome:
    """What a run has left behind.

    Attributes:
        losses: by micro-batch, (loss,) or (sum, count).
        kept: by micro-batch, the buffers after it, and the frozen parameters that forward writes.
    """

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    kept: list[dict[str, Tensor]] = field(default_factory=list)


def compare(traced: Trace, eager: Outcome, found: Outcome, tolerance: float) -> None:
    """Refuse the first difference: of the first micro-batch, then of the second.

    Args:
        tolerance: how far a result may be off, as a share of its largest entry.

    Raises:
        CaptureError: names what differs, by how much, and the user's line where it begins.
    """
    graph = traced.graph
    first, second = (
        _off(other, loss) for loss, other in zip(eager.losses, found.losses, strict=True)
    )
    if first > tolerance:
        raise _refusal(
            f"its loss is {float(eager.losses[0][0]):.6g}, and "
            f"{float(found.losses[0][0]):.6g} by its graph",
            "it differs from one call to the next, or reads what is not in its batch",
        )
    unequal = [n for n, g in eager.gradients.items() if _off(found.gradients[n], g) > tolerance]
    floor = (
        FLOOR * max((_largest(g) for g in eager.gradients.values()), default=0.0) if unequal else 0
    )
    off = {name: _off(found.gradients[name], eager.gradients[name], floor) for name in unequal}
    wrong = {name: share for name, share in off.items() if share > tolerance}
    if wrong:
        last, place = last_reader(graph, wrong)
        share = f"{wrong[last]:.2g} of" if math.isfinite(wrong[last]) else "all of"
        raise _refusal(
            f"{len(wrong)} of its {len(eager.gradients)} gradients are other ones by its graph; "
            f"behind {last!r} ({place or 'which no node reads'}), off by {share} its largest "
            "entry, they agree",
            "what follows there changes a gradient and not the result",
        )
    kept = ", ".join(traced.unsteady)
    for number, (states, others) in enumerate(zip(eager.kept, found.kept, strict=True)):
        for name, state in states.items():
            if name in others.keys() - traced.unsteady and _off(others[name], state) > tolerance:
                what = graph.states[name].kind if name in graph.states else "buffer"
                raise _refusal(
                    f"its {what} {name!r} is another one by its graph after micro-batch {number}",
                    f"write {what}s in place, in the forward of their own module",
                )
    if second > tolerance:
        raise _refusal(
            f"its loss in a second micro-batch is {float(eager.losses[1][0]):.6g}, and "
            f"{float(found.losses[1][0]):.6g} by its graph, which is that of a first call"
            + (f"; it keeps {kept}" if kept else ""),
            "keep it in a buffer, register_buffer, and write that in place",
        )


def _largest(gradient: Tensor | None) -> float:
    return float(gradient.abs().max()) if gradient is not None and gradient.numel() else 0.0


def _refusal(what: str, hint: str) -> CaptureError:
    return CaptureError(f"the model is not what its graph computes: {what}", hint=hint)


def _off(found: Tensor | None, expected: Tensor | None, floor: float = 0.0) -> float:
    """The largest difference of two tensors as a share of the largest entry of the second."""
    if found is None or expected is None:
        other = expected if found is None else found
        return math.inf if other is not None and bool(other.any()) else 0.0
    if found.shape != expected.shape:
        return math.inf
    if torch.equal(found, expected) or not expected.numel():
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    if not bool(expected.isfinite().all()):
        return 0.0  # the model's own numbers are no measure
    scale = max(float(expected.abs().max()), floor)
    return float((found - expected).abs().max()) / scale if scale else math.inf


def last_reader(graph: Graph, names: Iterable[str]) -> tuple[str, str]:
    """Of some parameters the one that is read last in forward, and the user's line there."""
    wanted = {State(name): name for name in names}
    for node in reversed(graph.nodes):
        for value in node.values():
            if value in wanted:
                return wanted[value], node.place
    return next(iter(wanted.values())), ""
