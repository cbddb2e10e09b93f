"""Clips gradients by their norm over the whole model, and finds a script that does by a part's.

    pipe.clip_grad_norm_(1.0)                                rank 0 and 1: norm 5 of all, times 1/5
    torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)   rank 0: norm 3 of its own, times 1/3
                                                             rank 1: norm 4 of its own, times 1/4

The second one trains with other gradients than plain PyTorch, and no single rank sees it. But its
own norm is the same after each such clipping, whatever it was before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.ir.torch_private import version
from autopipe.planfile.parts import Place
from autopipe.planfile.placements import I, Sharding
from autopipe.runtime.parameters.gradient_sum import Gradients, multiply, total_norm
from autopipe.runtime.script.copied import some_of
from autopipe.runtime.script.drawn import WIDTH, DrawnNumbers
from autopipe.runtime.script.own_numbers import OF, SAMPLED, Moves, Scale
from autopipe.runtime.script.part_changes import PartChanges

KINDS = 2.0, float("inf"), 1.0
"""Of norms that a script may clip by."""


@dataclass(frozen=True)
class _Scaled:
    """The norm of a rank's gradients, of one kind, when `step` ended, and when the optimizer
    began."""

    before: float
    after: float

    def clipped_like(self, other: _Scaled, rounding: float) -> bool:
        """Whether both were made smaller, from unlike norms to one."""
        smaller = all(one.after < one.before * (1 - rounding) for one in (self, other))
        alike = abs(self.after - other.after) <= rounding * self.after
        return smaller and alike and abs(self.before - other.before) > 10 * rounding * self.before


class Clipping:
    """Scales this rank's gradients, and knows whether something else has.

    Args:
        gradients: the rank's.
        sharding: how parameters lie over tensor-parallel ranks.
        world: the process group of all ranks; None if there is one.
        parts: whether ranks have parts of the model's gradients, and not each all of them.
        stages: whether other ranks have other stages.
        parted: the dims of a parameter that this rank has a part of, by name.
        own: which part of it, in words, by name.

    Attributes:
        parted, own: the same.
        drawn: knows what random numbers are written into gradients.
    """

    def __init__(
        self,
        gradients: Gradients,
        sharding: Sharding,
        place: Place,
        world: dist.ProcessGroup | None,
        *,
        parts: bool,
        stages: bool = False,
        parted: Mapping[str, Iterable[int]] = MappingProxyType({}),
        own: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._gradients, self._sharding, self._place = gradients, sharding, place
        self._world, self._parts = world, parts
        self._states: list[tuple[int, int]] = []
        self._some: Tensor | None = None
        self._last: list[_Scaled] = []
        self.parted, self.own, self._part_changes = parted, own, PartChanges(parted)
        self._moves = Moves(parted, norms=stages)
        compared = gradients.shards() if world is not None else {}
        self.drawn = DrawnNumbers(compared, own, parted=parts, what="gradients")
        self._written = (0,) * WIDTH
        self._scaled = Scale()
        self._told_norm = False

    @torch.no_grad()
    def clip(self, max_norm: float, device: torch.device) -> Tensor:
        """Scale all gradients to a norm of at most `max_norm`; all ranks call it.

        Returns:
            The norm before, of the whole model's gradients: float32, no dims, on `device`.
        """
        owned = self._gradients.owned_gradients().items()
        lies, first = self._sharding.states, self._place.tp == 0
        counted = [g for name, g in owned if first or lies.get(name, I) != I]
        norm = total_norm(counted, self._world, device)
        multiply(self._parameters(), torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        self.note()
        self._told_norm = True
        return norm.float()

    def note(self) -> None:
        """Take the gradients as they are for those of the step."""
        found = self._found()
        self._states = _states(found)
        self._some = _some(found) if found and self._parts else None
        self._part_changes.note(self._named())
        self._moves.note(self._gradients.shards())
        self._scaled = Scale()
        self._told_norm = False
        self.drawn.note()

    def written(self) -> tuple[int, ...]:
        """What was written into gradients that an update has used (`DrawnNumbers.numbers`)."""
        written, self._written = self._written, (0,) * WIDTH
        return written

    def untouched(self) -> bool:
        """Whether this rank's gradients are still there as the step has left them."""
        return bool(self._states) and _states(self._found()) == self._states

    @torch.no_grad()
    def are_of_one_step(self, steps: int) -> bool:
        """Whether this rank's gradients are those of the last of so many steps, or these scaled:
        not a sum that a script has made of them."""
        own = self._gradients.shards()
        factor = 1.0 if self.untouched() else self._moves.scaled(own, least=1).every
        return factor != 0.0 and abs(factor - steps) > 1e-3 * steps

    @torch.no_grad()
    def moved(self) -> Scale | None:
        """By how much weights were moved since the step; None: none was moved."""
        return self._moves.moved(self._gradients.shards())

    def scaled(self) -> Scale:
        """By how much gradients were scaled between the step and an update; 0: there was none."""
        return self._scaled

    @torch.no_grad()
    def used(self) -> None:
        """Look at the gradients that an optimizer has used: its own hooks may have scaled them."""
        if self._some is not None:
            own = self._gradients.shards()
            self._scaled = Scale(1.0, 1.0) if self.untouched() else self._moves.scaled(own)

    @torch.no_grad()
    def check(self) -> None:
        """Look at the gradients that an optimizer is about to use; raises once it is sure.

        Raises:
            ModelError: twice they were scaled to one norm of this rank's own; or one was changed by
                the mean or the norm of a part.
        """
        found = self._found()
        if not found or _states(found) == self._states:
            return
        if not any(self._written):
            self._written = self.drawn.numbers()
        if self._some is None:
            return
        self._part_changes.check(self._named())
        if self._told_norm:  # a script that has asked for the whole model's norm scales by it
            return
        rounding = max(1e-3, *(2 * torch.finfo(one.dtype).eps for one in found))
        factor = _factor(self._some, _some(found), rounding)
        if not factor:
            return
        afters = [float(torch.nn.utils.get_total_norm(found, kind)) for kind in KINDS]
        scaled, last = [_Scaled(after / factor, after) for after in afters], self._last
        self._last = scaled
        for kind, now, before in zip(KINDS, scaled, last, strict=False):
            if now.clipped_like(before, rounding):
                which, to = (f" (of kind {kind:g})", 1.0) if kind != KINDS[0] else ("", now.after)
                raise ModelError(
                    f"this rank's gradients were scaled to a norm{which} of {now.after:.4g} before "
                    f"two updates, from {before.before:.4g} and from {now.before:.4g}: that is the "
                    "norm of its own part of the model, and every rank has another one",
                    hint=f"pipe.clip_grad_norm_({to:.2g}) clips by the norm of the whole model",
                )

    def _parameters(self) -> Iterable[nn.Parameter]:
        return self._gradients.shards().values()

    def _named(self) -> dict[str, Tensor]:
        shards = self._gradients.shards().items()
        return {name: one.grad for name, one in shards if one.grad is not None}

    def _found(self) -> list[Tensor]:
        return [one.grad for one in self._parameters() if one.grad is not None]


def _states(gradients: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Equal for gradients that were neither written nor replaced; costs no look at their values."""
    return [(one.data_ptr(), version(one)) for one in gradients]


def _some(gradients: Iterable[Tensor]) -> Tensor:
    """Some entries of the largest gradients, float32."""
    largest = sorted(gradients, key=Tensor.numel)[-OF:]
    return torch.cat([some_of(one, SAMPLED).float() for one in largest])


def _factor(before: Tensor | None, after: Tensor, rounding: float) -> float:
    """By what entries were multiplied; 0: not all by the same."""
    if before is None or before.shape != after.shape:
        return 0.0
    factor = after.abs().sum() / before.abs().sum()
    off = (after - before * factor).abs().max()
    return float(factor) if off <= rounding * after.abs().max() else 0.0


def parted_dims(gradients: Gradients, sharding: Sharding) -> dict[str, list[int]]:
    """The dims of each parameter of which a rank has a part of the gradient, by name."""
    found = {}
    for name in gradients.shards():
        lies, rows = sharding.states.get(name, I), gradients.rows.get(name)
        found[name] = [lies.dim] if lies.sharded else []
        found[name] += [rows.dim] if rows is not None else []
    return found


def own_parts(gradients: Gradients, sharding: Sharding, place: Place) -> dict[str, str]:
    """Which part of each parameter a rank has, in words that are the same on all ranks that have
    it, by name."""
    found = {}
    for name in gradients.shards():
        lies, rows = sharding.states.get(name, I), gradients.rows.get(name)
        found[name] = f"{place.tp if lies.sharded else ''} {rows or ''}"
    return found
