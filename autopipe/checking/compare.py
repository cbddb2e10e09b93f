"""Two steps of both sides, tensor by tensor: a row for each kind of tensor in each step.

    step  what        tensors  equal  furthest off    of            allowed
    1     loss              1      1             0    ...           0, or 1e-05

A tensor is off by its largest difference, as a share of the largest entry of the whole unsplit
tensor. For a gradient the divisor is at least `FLOOR` of the largest entry of all gradients, since
some gradients are zero up to rounding (the bias of an attention's keys).

If a plan in 16 bits changes the order of sums, a gradient may also be `TWICE` as far off as
rounding moves it in plain PyTorch, measured as:

    16 bits beside fp32                              a sum that cancels loses much
    16 bits beside `NUDGES` runs with parameters     two experts' scores nearly tie, and rounding
    off by half a unit in their last place           sends a token to another expert
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.checking.layout import RankLayout
from autopipe.checking.split import CLIP, RankStep
from autopipe.checking.unsplit import Unsplit, WholeStep
from autopipe.eager.assigned_buffers import buffers_of
from autopipe.errors import ModelError
from autopipe.planfile.contents import BATCH, Plan
from autopipe.planfile.parts import Place
from autopipe.planfile.regions import COMPILED
from autopipe.planners.driver.outcomes import TOLERANCE, numbers_of
from autopipe.stages.precision import copy_dtype

FP32 = 1e-5
"""How far a sum of fp32 may be off whose order has changed; of 16 bits `TOLERANCE`."""

FLOOR = 1e-3

TWICE = 2.0

NUDGES = 4
"""Made only where gradients differ: each costs a step. In each of six such runs of a DeepSeek-V3 of
four layers some tokens went to other experts."""

SQUARES = 1e-4
"""How far a norm may be off: torch adds up the squares of millions of entries in fp32."""


@dataclass(frozen=True)
class TensorRow:
    """One kind of tensor in one step.

    Attributes:
        what: "loss", "gradients", "clipped norm", "buffers" or "parameters".
        tensors: how many were compared; a tensor on several ranks counts once for each.
        equal: how many of them are equal bit by bit.
        off: the largest difference, as a share; infinite if a tensor is on one side only.
        furthest: the name of the tensor with this difference.
        allowed: the largest allowed share.
        wrong: the names of the tensors that are off by more.
    """

    step: int
    what: str
    tensors: int
    equal: int
    off: float
    furthest: str
    allowed: float
    wrong: tuple[str, ...]


def orders_kept(plan: Plan) -> bool:
    """Whether the plan changes the order of no sum of floats, so that every bit must be equal.

    These change it: tensor parallelism, compilers, a loss in parts, fused attention, three
    replicas, ZeRO-2 and 3 (they sum over replicas before micro-batches), gradients that come from
    several stages, a loss over a batch in several micro-batches, torch.jit (`regions.COMPILED`),
    and a part that runs as it is (it adds up its own part of a tensor's gradient first).
    """
    readers: dict[str, int] = {}
    for stage in plan.stages:
        for name in (*stage.parameters, *(t.name for t in stage.receives if t.gradient)):
            readers[name] = readers.get(name, 0) + 1
    one_reader = all(count == 1 for count in readers.values())
    if plan.loss_over == BATCH and plan.mesh.dp * plan.batch.micro_batches > 1:
        return False
    if any(region.why == COMPILED or region.carrying for region in plan.regions):
        return False
    rewritten = plan.compiled or plan.loss_parts or plan.fused_attention
    single = plan.mesh.tp == 1 and plan.mesh.dp <= 2 and not rewritten
    return single and one_reader and not plan.scatters


def compared(
    unsplit: Unsplit,
    plan: Plan,
    batches: Sequence[Any],
    ranks: Sequence[Sequence[RankStep]],
    wide: Unsplit | None = None,
    *,
    exact: bool,
) -> list[TensorRow]:
    """Run the unsplit model's steps, and compare them with those of the ranks.

    Args:
        ranks: the steps of the split model, by rank, then by step.
        wide: the unsplit model in fp32, if that is not the plan's precision.
        exact: whether every bit has to be equal.

    Raises:
        Unmatched, Unrepeatable: as `Unsplit.step`.
        ModelError: the loss is a number on neither side.
    """
    layout, rows = RankLayout.of(plan, unsplit.frozen), list[TensorRow]()
    for number, batch in enumerate(batches):
        found = {place: ranks[place.rank][number] for place in plan.mesh.places}
        step = _StepOfRanks(layout, number + 1, found, buffers_of(unsplit.model), exact)
        first = next(iter(found.values()))
        noise: dict[str, float] = {}
        if wide is not None:
            wide.follow(unsplit)
        expected = unsplit.step(batch, first.scale)
        _check_number(expected.loss, first.loss, number + 1)
        if wide is not None:
            noise = _noise(expected.gradients, wide.step(batch, 1.0).gradients)
        noise = {**dict.fromkeys((*unsplit.sparse, *unsplit.averaged), FP32), **noise}
        before = step.before(expected, noise)
        if wide is not None and any(row.wrong for row in before):
            for seed in range(NUDGES):
                nudged = _noise(unsplit.nudged(batch, first.scale, seed), expected.gradients)
                noise |= {name: max(share, noise.get(name, 0.0)) for name, share in nudged.items()}
            before = step.before(expected, noise)
        rows += before
        norm = first.norm if first.norm is not None else torch.tensor(0.0)
        most = CLIP * float(norm)
        gradients = {
            name: step.whole(name, like, "gradients") for name, like in expected.gradients.items()
        }
        unsplit.update(gradients, torch.clamp(most / (norm + 1e-6), max=1.0))
        rows.append(step.parameters(unsplit.model, expected))
        with torch.no_grad():
            for name, parameter in unsplit.model.named_parameters():
                parameter.copy_(step.whole(name, parameter, "parameters"))
    return rows


def _check_number(unsplit: Tensor, split: Tensor, step: int) -> None:
    """Refuse losses that are no numbers: all that follows from them is nan on both sides, and
    equal whatever the split does."""
    if not bool(unsplit.isfinite()) and not bool(split.isfinite()):
        raise ModelError(
            f"the loss of step {step} is {float(unsplit)}, in plain PyTorch too: where no number "
            "comes out, nothing can be compared",
            hint="let inputs(batch_size) give rows, and model() weights, of which the loss is a "
            "number",
        )


def _noise(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """How far rounding alone moves each gradient, as a share; without those that have no bounds."""
    largest = max((_largest(gradient) for gradient in expected.values()), default=0.0)
    shares = {
        name: off(found[name], gradient, FLOOR * largest)
        for name, gradient in expected.items()
        if name in found
    }
    return {name: share for name, share in shares.items() if math.isfinite(share)}


def rounding(plan: Plan) -> float:
    """The allowed difference of a sum in another order, as a share of the largest entry."""
    dtype = copy_dtype(plan.precision)
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    low = [d for d, name in names.items() if d == dtype or name in plan.products]
    return max((TOLERANCE[d] for d in low), default=FP32)


def nearness(plan: Plan) -> tuple[str, ...]:
    """Sentences on how near gradients have to be, and why."""
    if orders_kept(plan):
        return ("every bit of gradients has to be equal: the plan changes the order of no sum",)
    found = (
        f"gradients have to be equal to {rounding(plan):g} of their largest entry: the plan "
        f"changes the order of sums in {plan.precision}",
    )
    if plan.precision == "fp32":
        return found
    return (*found, f"or to twice what rounding to {plan.precision} moves them in plain PyTorch")


_Pair = tuple[str, Tensor | None, Tensor | None, float]
"""A tensor's name; a rank's and the expected one; the least divisor of their difference."""


class _StepOfRanks:
    """One step of all ranks, to be compared.

    Args:
        buffers: the names of the model's buffers.
    """

    def __init__(
        self,
        layout: RankLayout,
        number: int,
        found: Mapping[Place, RankStep],
        buffers: Collection[str],
        exact: bool,
    ) -> None:
        self.layout, self.number, self.found, self.exact = layout, number, found, exact
        self._buffers = [*buffers]
        self.rounding = rounding(layout.plan)
        self.unit = 0.0  # of the last place, in the narrowest dtype that was compared

    def before(self, expected: WholeStep, noise: Mapping[str, float]) -> list[TensorRow]:
        """The rows of loss, gradients, norm and buffers: those before the optimizer's step.

        Args:
            noise: by gradient or buffer, how far rounding alone has moved it.
        """
        largest = max((_largest(g) for g in expected.gradients.values()), default=0.0)
        losses, gradients, buffers, norms = (list[_Pair]() for _ in range(4))
        for place, found in self.found.items():
            losses.append(("loss", found.loss.to(expected.loss.dtype), expected.loss, 0.0))
            norms.append(("norm", found.norm, expected.norm, 0.0))
            for name in found.parameters:
                whole = expected.gradients.get(name)
                expected_part = None if whole is None else self.layout.trained(name, whole, place)
                scale = max(FLOOR * largest, 0.0 if whole is None else _largest(whole))
                gradients.append((name, found.gradients.get(name), expected_part, scale))
            of_replica = expected.buffers[place.dp]
            for name, buffer in found.buffers.items():
                if name in of_replica:
                    expected_part = self.layout.shard(name, of_replica[name], place)
                    buffers.append((name, buffer, expected_part, _largest(of_replica[name])))
        gradients += [(n, None, g, 0.0) for n, g in expected.gradients.items() if self._nowhere(n)]
        buffers += [(name, None, buffer, 0.0) for name, buffer in self._lost(expected)]
        off = 0.0 if self.exact else self.rounding
        # A mean of micro-batches is rounded in the dtype of the loss, before and after replicas;
        # ranks without the last stage get it in fp32, that of an fp64 model too.
        dtypes = {expected.loss.dtype, *(found.loss.dtype for found in self.found.values())}
        mean = 4 * max(torch.finfo(dtype).eps for dtype in dtypes)
        tensors = (expected.loss, *expected.gradients.values())
        self.unit = max(torch.finfo(tensor.dtype).eps for tensor in tensors)
        norm = max(SQUARES, self.rounding, self.unit)
        return [
            self._row("loss", losses, max(mean, off)),
            self._row("gradients", gradients, off, noise),
            self._row("clipped norm", norms, norm),
            self._row("buffers", buffers, off, noise),
        ]

    def parameters(self, model: nn.Module, expected: WholeStep) -> TensorRow:
        """The row of parameters after both optimizers have stepped by the same gradients; of frozen
        ones, which forward may move by its rows, each replica has its own."""
        pairs = []
        for place, found in self.found.items():
            of_replica, frozen = expected.buffers[place.dp], self.layout.frozen
            for name, tensor in found.parameters.items():
                if name:
                    own = of_replica[name] if name in frozen else model.get_parameter(name)
                    whole = own.detach().to(tensor.dtype)
                    expected_part = self.layout.trained(name, whole, place)
                    pairs.append((name, tensor, expected_part, _largest(whole)))
        return self._row("parameters", pairs, max(1e-6, self.unit))

    def whole(self, name: str, like: Tensor, of: str) -> Tensor:
        """A gradient or parameter whole, from all ranks' parts."""
        parts = [
            (place, getattr(found, of)[name])
            for place, found in self.found.items()
            if name in getattr(found, of)
        ]
        return self.layout.whole(name, like, parts)

    def _lost(self, expected: WholeStep) -> Iterator[tuple[str, Tensor]]:
        """The buffers that the unsplit model has moved, and no rank of that replica has; those that
        get another shape are caches, which ranks make anew."""
        for dp, (before, after) in enumerate(zip(expected.before, expected.buffers, strict=True)):
            ranks = [found.buffers for place, found in self.found.items() if place.dp == dp]
            held = {id(after[n]) for own in ranks for n in own if n in after}  # by all its names
            for name in (n for n in self._buffers if n in before and n in after):
                alike = before[name].shape == after[name].shape
                if alike and id(after[name]) not in held and off(after[name], before[name]):
                    yield name, after[name]

    def _nowhere(self, name: str) -> bool:
        return not any(name in found.parameters for found in self.found.values())

    def _row(
        self,
        what: str,
        pairs: Sequence[_Pair],
        allowed: float,
        noise: Mapping[str, float] | None = None,
    ) -> TensorRow:
        most = {name: TWICE * share for name, share in (noise or {}).items()}
        shares = [(off(found, expected, scale), name) for name, found, expected, scale in pairs]
        furthest = max(shares, key=lambda share: share[0], default=(0.0, ""))
        wrong = dict.fromkeys(
            name for share, name in shares if share > max(allowed, most.get(name, 0.0))
        )
        equal = sum(share == 0.0 for share, _ in shares)
        name = furthest[1] if furthest[0] > 0 else ""
        return TensorRow(
            self.number, what, len(pairs), equal, furthest[0], name, allowed, tuple(wrong)
        )


def off(found: Tensor | None, expected: Tensor | None, floor: float = 0.0) -> float:
    """The largest difference, as a share of the expected tensor's largest entry, or of `floor`.

    Of complex numbers real and imaginary parts are compared. 0.0: equal bits, or nan on both sides.
    Infinite: one tensor is missing, has another shape, or is nan where the other is a number.
    """
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    if (found.shape, found.is_complex()) != (expected.shape, expected.is_complex()):
        return math.inf
    if torch.equal(found, expected) or not expected.numel():
        return 0.0
    found, expected = numbers_of(found), numbers_of(expected)
    alike = (found == expected) | (found.isnan() & expected.isnan())
    if bool(alike.all()):
        return 0.0
    far = torch.where(alike, 0.0, (found - expected).abs())
    if not bool(far.isfinite().all()):
        return math.inf
    known = expected[expected.isfinite()]
    scale = max(float(known.abs().max()) if known.numel() else 0.0, floor)
    return float(far.max()) / scale if scale else math.inf


def _largest(tensor: Tensor) -> float:
    """The largest entry of floats, or of complex numbers; 0.0 of others, or if it is no number."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    found = float(tensor.detach().abs().max())
    return found if math.isfinite(found) else 0.0
