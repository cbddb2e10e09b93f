"""Finds scripts that scale gradients, or move weights along them, by a number of a rank's own.

    for p in pipe.parameters(): p.grad *= 0.1 / norm     rank 0: times 0.4; rank 1: times 0.5
    for p in pipe.parameters(): p += 0.05 / norm * p.grad        SAM's first step, likewise

Each rank takes the norm of its part, plain PyTorch of all. So ranks tell each other by how much
they have scaled, before the next step. Ranks with parts of the same weights scale them alike. Those
of other stages may have another rate, but no norm in common, nor a ratio that changes from update
to update.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations

import torch
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.planfile.contents import Plan

SAMPLED, OF = 256, 4
"""So many entries of so many weights, or gradients, tell by how much all are moved, or scaled."""

ALIKE, UNLIKE = 1e-3, 1e-2
"""Shares of a number: two that differ by less are one, and by more are two. Roundings are less."""

WIDTH = 8
"""The numbers that a rank tells of itself."""


@dataclass(frozen=True)
class Scale:
    """By how much a rank has scaled its gradients, or moved its weights along them; 0: it has not,
    or not all alike.

    Attributes:
        one: of one parameter that ranks have parts of.
        every: of all that were changed, of two or more.
        norm: of all the rank's gradients that are scaled, or weights' moves; 0: not known.
        lone: of the one weight of a rank that has no other: by a norm of the rank's, or by one of
            each weight's own.
    """

    one: float = 0.0
    every: float = 0.0
    norm: float = 0.0
    lone: float = 0.0

    @property
    def all(self) -> float:
        """By how much all was changed that the rank has."""
        return self.every or self.lone


@dataclass(frozen=True)
class _Entries:
    """Some entries of weights and of their gradients, by the parameter's name.

    Attributes:
        norm: of all gradients; None: it is not asked for.
        alone: whether there is one weight, and no other.
    """

    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    norm: Tensor | None
    alone: bool


class Moves:
    """Looks at a rank's weights when a step has ended, and before the next one.

    Args:
        parted: the dims of parameters that the rank has a part of, by name.
        norms: whether ranks of other stages are compared by norms.
    """

    def __init__(self, parted: Mapping[str, Iterable[int]], *, norms: bool) -> None:
        self._one = min((name for name, dims in parted.items() if dims), default=None)
        self._parted = parted
        self._norms = norms
        self._seen: _Entries | None = None

    def note(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Take the weights, and the gradients that a step has made, as they are."""
        found = {name: p.grad for name, p in weights.items() if p.grad is not None and p.numel()}
        names = sorted(found, key=lambda name: (found[name].numel(), name))[-OF:]
        names += [name for name in [self._one] if name in found and name not in names]
        self._seen = _Entries(
            _some(weights, names),
            _some(found, names),
            nn.utils.get_total_norm(found.values()) if found and self._norms else None,
            len(weights) == 1,
        )

    def moved(self, weights: Mapping[str, nn.Parameter]) -> Scale | None:
        """By how much weights were moved since, along the gradients; None: none was moved."""
        seen = self._seen
        if seen is None or not all(name in weights for name in seen.weights):
            return None
        after = _some(weights, seen.weights)
        changes = {name: after[name] - before for name, before in seen.weights.items()}
        own = [name for name, change in changes.items() if bool(change.any())]
        if not own:
            return None
        noise = {name: _noise(weights[name], one) for name, one in after.items()}
        for power in (0, 2):  # SAM, and the adaptive one: along the gradient times squares of w
            along = {n: seen.gradients[n] * seen.weights[n] ** power for n in own}
            every = _factor(changes, along, noise, own) if len(own) > 1 else 0.0
            one = _factor(changes, along, noise, self._of_one(weights) if self._one in own else ())
            lone = _factor(changes, along, noise, own if seen.alone else ())
            norm = float(seen.norm) if seen.norm is not None and not power else 0.0
            if every or one or lone:
                return Scale(one, every, abs(every or lone) * norm, lone)
        return Scale()

    def _of_one(self, tensors: Mapping[str, Tensor]) -> Sequence[str]:
        """The name of the one parameter; none where it has so few rows here that each may have been
        scaled by itself."""
        if self._one is None:
            return ()
        shape = tensors[self._one].shape
        return [self._one] if all(shape[dim] > 2 for dim in self._parted[self._one]) else ()

    def scaled(self, weights: Mapping[str, nn.Parameter], least: int = 2) -> Scale:
        """By how much the gradients were scaled since, that an optimizer is about to use.

        Args:
            least: of so many parameters: one alone may be clipped by its own norm.
        """
        seen = self._seen
        found = {name: p.grad for name, p in weights.items() if p.grad is not None}
        if seen is None or not seen.gradients or not all(name in found for name in seen.gradients):
            return Scale()
        after = _some(found, seen.gradients)
        noise = {name: _noise(found[name], one) for name, one in after.items()}
        own = [name for name, one in after.items() if not torch.equal(one, seen.gradients[name])]
        if not own:
            return Scale(1.0, 1.0)
        every = _factor(after, seen.gradients, noise, own) if len(own) >= least else 0.0
        one = _factor(
            after, seen.gradients, noise, self._of_one(found) if self._one in after else ()
        )
        lone = _factor(after, seen.gradients, noise, own if seen.alone else ())
        norm = self._norms and (every or lone)
        total = float(nn.utils.get_total_norm(found.values())) if norm else 0.0
        return Scale(one, every, total, lone)


class OwnNumbers:
    """Compares what ranks have scaled, step by step."""

    def __init__(self, plan: Plan) -> None:
        self._places = plan.mesh.places
        self._last: dict[tuple[str, tuple[int, int]], tuple[float, float]] = {}

    def check(self, told: Sequence[Sequence[int]]) -> None:
        """Look at what all ranks have told, by rank (`numbers`).

        Raises:
            ModelError: two ranks have scaled by numbers of their own.
        """
        unlike = {(place.pp, *told[place.rank]): place for place in reversed(self._places)}
        heard = {place.rank: _heard(told[place.rank]) for place in unlike.values()}
        places = sorted(unlike.values(), key=lambda place: place.rank)  # few, of thousands
        for number, what in enumerate(_WORDS):
            scales = {rank: of_rank[number] for rank, of_rank in heard.items()}
            stages, ones = dict[int, int](), dict[int, int]()  # the first rank of each that tells
            for place in places:
                scale = scales[place.rank]
                for known in (*[stages] * bool(scale.all), *[ones] * bool(scale.one)):
                    first = known.setdefault(place.pp, place.rank)
                    if apart := _of_one_stage(scales[first], scale):
                        raise _error(what, (first, place.rank), apart)
            for ranks in combinations(stages.values(), 2):
                if apart := self._of_two(what, ranks, *(scales[rank] for rank in ranks)):
                    raise _error(what, ranks, apart)

    def _of_two(
        self, what: str, ranks: tuple[int, int], first: Scale, second: Scale
    ) -> tuple[float, float] | None:
        """The factors of two stages, if they are of norms of their own."""
        now = first.all, second.all
        if 0.0 in now or 1.0 in now or not (first.every or second.every):
            return None
        last = self._last.get((what, ranks))
        self._last[what, ranks] = now
        if not differ(*now, UNLIKE):
            return None
        if first.norm and second.norm and not differ(first.norm, second.norm, ALIKE):
            return now
        if last is None or not all(differ(*pair, UNLIKE) for pair in zip(now, last, strict=True)):
            return None
        return now if differ(now[0] * last[1], last[0] * now[1], UNLIKE) else None


def numbers(gradients: Scale, weights: Scale) -> tuple[int, ...]:
    """What a rank tells of itself, as integers of 64 bits."""
    return as_integers((*astuple(gradients), *astuple(weights)))


def as_integers(floats: Sequence[float]) -> tuple[int, ...]:
    """Floats by their bits, as the first message of a step has them."""
    return struct.unpack(f"<{len(floats)}q", struct.pack(f"<{len(floats)}d", *floats))


def as_floats(integers: Sequence[int]) -> tuple[float, ...]:
    """The floats of `as_integers`."""
    return struct.unpack(f"<{len(integers)}d", struct.pack(f"<{len(integers)}q", *integers))


def _heard(told: Sequence[int]) -> tuple[Scale, Scale]:
    floats = as_floats(told)
    return Scale(*floats[: WIDTH // 2]), Scale(*floats[WIDTH // 2 :])


_WORDS = "scaled their gradients", "moved their weights along the gradients"


def _of_one_stage(first: Scale, second: Scale) -> tuple[float, float] | None:
    """The factors of two ranks that have parts of the same weights, if they differ."""
    for pair in ((first.every, second.every), (first.one, second.one)):
        if 0.0 not in pair and differ(*pair, ALIKE):
            return pair
    return None


def differ(one: float, other: float, by: float) -> bool:
    """Whether two numbers differ by more than a share of the larger."""
    return abs(one - other) > by * max(abs(one), abs(other))


def _error(what: str, ranks: tuple[int, int], factors: tuple[float, float]) -> ModelError:
    return ModelError(
        f"ranks {ranks[0]} and {ranks[1]} have {what} by {factors[0]:.4g} and {factors[1]:.4g} "
        "times these: by a number of each one's own part of the model, such as its norm, where "
        "plain PyTorch takes one of all of it",
        hint="pipe.clip_grad_norm_(1.0) clips by the norm of the whole model, and "
        "pipe.clip_grad_norm_(float('inf')) gives that norm to every rank; each rank calls it",
    )


def _some(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Some entries of each of these, float32."""
    found = {}
    for name in names:
        flat = tensors[name].detach().reshape(-1)  # a gradient may lie otherwise than its weight
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        found[name] = flat[:: flat.numel() // SAMPLED | 1].float().clone()
    return found


def _noise(tensor: Tensor, entries: Tensor) -> Tensor:
    """How far off entries may be that were rounded to the tensor's dtype."""
    return entries.abs() * (2 * torch.finfo(tensor.dtype).eps)


def _factor(
    changes: Mapping[str, Tensor],
    along: Mapping[str, Tensor],
    noise: Mapping[str, Tensor],
    names: Sequence[str],
) -> float:
    """By what `along` was multiplied to give the changes; 0: not all by the same, or too little to
    be told from rounding."""
    if not names:
        return 0.0
    change, base, off = (torch.cat([each[n] for n in names]) for each in (changes, along, noise))
    squares = float(base.square().sum())
    factor = float((change * base).sum()) / squares if squares else 0.0
    made = base * factor
    alike = bool(((change - made).abs() <= ALIKE * made.abs() + 2 * off).all())
    unsure = float(off.norm()) / len(base) ** 0.5 > ALIKE / 4 * float(made.norm())
    return 0.0 if not alike or unsure else factor
