"""What a run of a model and one of its graph have alike, and the comparison of their outcomes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.eager.second_run import MOST_ALIKE
from autopipe.errors import CaptureError
from autopipe.ir.graph import Graph, State
from autopipe.ir.torch_private import TorchDispatchMode
from autopipe.tracing.traced import Trace

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""How far a result may be off, as a share of its largest entry: sums in another order."""

FLOOR = 1e-3
"""A gradient is compared with its own largest entry, or with this share of the largest of all."""

SAME = 1e-6
"""How far a second micro-batch may be off where nothing but rounding may change from the first."""


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        losses: by micro-batch, (loss,) or (sum, count).
        gradients: by micro-batch, of its loss alone; empty for a loss without gradient.
        kept: by micro-batch, the buffers after it, and the frozen parameters that forward writes.
    """

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    kept: list[dict[str, Tensor]] = field(default_factory=list)


class Weights:
    """The trained parameters of a model: one set of values for each micro-batch."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._of_each = [{name: p.detach().clone() for name, p in self._own.items()}]

    @torch.no_grad()
    def move(self, number: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Give the model the values of micro-batch `number`.

        Args:
            gradients: those of the micro-batch before, from which new values are made.
        """
        if number == len(self._of_each):
            self._of_each.append(
                {name: _stepped(p, gradients.get(name)) for name, p in self._own.items()}
            )
        for name, p in self._own.items():
            p.copy_(self._of_each[number][name])


class SameNumbers(TorchDispatchMode):
    """Makes each random op of a micro-batch draw from one seed, since the graph lacks the model's
    unused draws.

    A loop that draws until a number will do would not end: after `MOST_ALIKE` draws each has a seed
    of its own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(max(0, self._drawn - MOST_ALIKE))
            self._drawn += 1
        return func(*args, **(kwargs or {}))


def _stepped(weight: Tensor, gradient: Tensor | None) -> Tensor:
    """A weight after a step of an optimizer, by a quarter of its largest entry."""
    largest = 0.0 if gradient is None or not gradient.numel() else float(gradient.abs().max())
    if gradient is None or not 0 < largest < math.inf:
        return weight.detach().clone()
    distance = 0.25 * (float(weight.abs().max()) or 1.0)
    return weight.detach() - (distance / largest * gradient).to(weight.dtype)


def gradients_of(loss: Tensor, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor | None]:
    """The gradients, by backward as in training: reentrant checkpoints refuse autograd.grad. What
    else has one, as weights of a loss, has it as before."""
    before = [(one, one.grad) for one in (*trained.values(), *_leaves(loss))]
    for parameter, _ in before:
        parameter.grad = None
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        return {name: _dense(parameter.grad) for name, parameter in trained.items()}
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _leaves(loss: Tensor) -> list[Tensor]:
    """The tensors to which backward gives gradients."""
    pending, seen, found = [loss.grad_fn], set[Any](), list[Tensor]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [after for after, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        found += [leaf] if isinstance(leaf, Tensor) else []
    return found


def _dense(gradient: Tensor | None) -> Tensor | None:
    """A gradient as the graph has it: dense, also for embeddings with sparse=True."""
    return None if gradient is None else gradient.to_dense()


def compare(traced: Trace, eager: Outcome, of_graph: Outcome, tolerance: float) -> None:
    """Refuse the first difference: of the first micro-batch, then of the second.

    Args:
        tolerance: how far a result may be off, as a share of its largest entry.

    Raises:
        CaptureError: names what differs, by how much, and the user's line where it begins.
    """
    graph = traced.graph
    if _off(of_graph.losses[0], eager.losses[0]) > tolerance:
        raise _refusal(
            f"its loss is {float(eager.losses[0][0]):.6g}, and "
            f"{float(of_graph.losses[0][0]):.6g} by its graph",
            "it differs from one call to the next, or reads what is not in its batch",
        )
    wrong = _wrong_gradients(eager.gradients[0], of_graph.gradients[0], tolerance)
    if wrong:
        last, place = last_reader(graph, wrong)
        share = f"{wrong[last]:.2g} of" if math.isfinite(wrong[last]) else "all of"
        raise _refusal(
            f"{len(wrong)} of its {len(eager.gradients[0])} gradients differ in its graph; "
            f"after {last!r} ({place or 'which no node reads'}), off by {share} its largest "
            "entry, they agree",
            "what follows there changes a gradient and not the result",
        )
    for number, (states, others) in enumerate(zip(eager.kept, of_graph.kept, strict=False)):
        for name, state in states.items():
            compared = name in others and name not in {*traced.unsteady, *traced.caches}
            if compared and _off(others[name], state) > tolerance:
                what = graph.states[name].kind if name in graph.states else "buffer"
                raise _refusal(
                    f"its {what} {name!r} differs in its graph after micro-batch {number}",
                    f"write {what}s in place, in the forward of their own module",
                )
    if of_graph.losses[1:]:
        _compare_later(traced, eager, of_graph, tolerance)


def _compare_later(traced: Trace, eager: Outcome, of_graph: Outcome, tolerance: float) -> None:
    """Refuse a model whose second micro-batch has other results than its graph's.

    A Python number that falls a little in each call (`1 - self.step / 10_000`) makes only a small
    difference. So if the model made other calls of torch in its second run, the graph has to be as
    near in the second micro-batch as it was in the first.
    """
    if traced.unsteady:
        gradients = eager.gradients[0]
        floor = FLOOR * max(map(_largest, gradients.values()), default=0.0)
        off = [_off(of_graph.gradients[0].get(name), g, floor) for name, g in gradients.items()]
        first = max([*off, _off(of_graph.losses[0], eager.losses[0])])
        tolerance = min(tolerance, 8 * first + SAME)
    kept = f"; it keeps {', '.join(traced.unsteady)}" if traced.unsteady else ""
    hint = "keep it in a buffer that __init__ registers, and write that in place"
    if _off(of_graph.losses[1], eager.losses[1]) > tolerance:
        raise _refusal(
            f"its loss in a second micro-batch is {float(eager.losses[1][0]):.9g}, and "
            f"{float(of_graph.losses[1][0]):.9g} by its graph, which is that of a first call{kept}",
            hint,
        )
    wrong = _wrong_gradients(eager.gradients[1], of_graph.gradients[1], tolerance)
    if wrong:
        last, place = last_reader(traced.graph, wrong)
        raise _refusal(
            f"{len(wrong)} of its {len(eager.gradients[1])} gradients in a second micro-batch are "
            f"different in its graph, which is that of a first call, that of {last!r} "
            f"({place or 'which no node reads'}) among them{kept}",
            hint,
        )


def compare_ahead(traced: Trace, now: Outcome, ahead: Outcome, calls: int) -> None:
    """Refuse a model whose outcome on the same rows differs once its counts are set far ahead.

    Raises:
        CaptureError: names the kept values, and the tensor that differs.
    """
    loss, later = now.losses[0], ahead.losses[0]
    if _off(later, loss) <= SAME and not _wrong_gradients(
        now.gradients[0], ahead.gradients[0], SAME
    ):
        return
    raise _refusal(
        f"its loss is {float(loss[0]):.9g} now, and {float(later[0]):.9g} on the same rows after "
        f"{calls} more calls, or gradients are others; it keeps {', '.join(traced.unsteady)}",
        "count in a buffer, and choose by torch.where(self.step < 100, a, b)",
    )


def _wrong_gradients(
    eager: Mapping[str, Tensor | None], of_graph: Mapping[str, Tensor | None], tolerance: float
) -> dict[str, float]:
    """The gradients that are off by more than the tolerance, and by how much."""
    unequal = [name for name, g in eager.items() if _off(of_graph.get(name), g) > tolerance]
    if not unequal:
        return {}
    floor = FLOOR * max(_largest(gradient) for gradient in eager.values())
    off = {name: _off(of_graph.get(name), eager[name], floor) for name in unequal}
    return {name: share for name, share in off.items() if share > tolerance}


def _largest(gradient: Tensor | None) -> float:
    """The largest finite entry of a tensor."""
    if gradient is None or not gradient.numel():
        return 0.0
    return float(gradient.abs().nan_to_num(0.0, 0.0).max())


def _refusal(what: str, hint: str) -> CaptureError:
    return CaptureError(f"the model is not what its graph computes: {what}", hint=hint)


def _off(tensor: Tensor | None, expected: Tensor | None, floor: float = 0.0) -> float:
    """The largest difference of two tensors as a share of the largest entry of the second."""
    if tensor is None or expected is None:
        only = expected if tensor is None else tensor
        return math.inf if only is not None and bool(only.any()) else 0.0
    if tensor.shape != expected.shape:
        return math.inf
    if torch.equal(tensor, expected) or not expected.numel():
        return 0.0
    tensor, expected = numbers_of(tensor), numbers_of(expected)
    measure = expected.isfinite()  # the model's other numbers are none
    tensor, expected = tensor[measure], expected[measure]
    if not expected.numel():
        return 0.0
    if not bool(tensor.isfinite().all()):
        return math.inf
    off, scale = float((tensor - expected).abs().max()), max(float(expected.abs().max()), floor)
    return (off / scale if scale else math.inf) if off else 0.0


def numbers_of(tensor: Tensor) -> Tensor:
    """The numbers of a tensor in fp64; of a complex one real and imaginary parts."""
    found = tensor.detach()
    if found.is_complex():
        found = torch.view_as_real(found.resolve_conj())  # autograd leaves some for later
    return found.double()


def last_reader(graph: Graph, names: Iterable[str]) -> tuple[str, str]:
    """The parameter, among some, that forward reads last, and the user's line there."""
    names_of = {State(name): name for name in names}
    for node in reversed(graph.nodes):
        for value in node.values():
            if value in names_of:
                return names_of[value], node.place
    return next(iter(names_of.values())), ""
