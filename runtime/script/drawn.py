"""Finds scripts that write random numbers into weights, of which each rank has others.

    for p in pipe.parameters(): nn.init.xavier_uniform_(p)

    ZeRO, tp  each rank draws the same numbers for its rows or columns, with a fan of these alone
    stages    each rank draws from the beginning of the generator's numbers
    replicas  a rank that draws others than the next one trains apart from it

Plain PyTorch draws whole weights, one after the other. So ranks tell each other, before a step, how
the first weight begins that was written since an update, and where torch's generator stands.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.runtime.script.own_numbers import differ

OF, ENTRIES = 6, 8
"""So many weights are looked at, at so many of their first entries: numbers that two ranks draw
from one state of a generator are alike there, however many they draw."""

NEAR = 1e-3
"""Shares of a number: two that differ by less are one."""

WIDTH = 7
"""The numbers that a rank tells of itself."""

_HINT = (
    "initialise the module before autopipe.parallelize; or, later, a whole new one on each rank by "
    "the same seed: pipe.load_state_dict(new.state_dict())"
)


@dataclass(frozen=True)
class _Told:
    """What a rank tells of the first weight that was written.

    Attributes:
        part: a hash of the weight, and of which part of it the rank has; 0: none was written.
        value, norm: of its first entries a weighted sum, and the norm.
        form: two numbers that are left of these entries without their mean and their scale; 0:
            they are not drawn.
        began, ended: hashes of where the generator was when the rank looked last, and is now; 0:
            it has not moved.
    """

    part: int
    value: float
    norm: float
    form: tuple[float, float]
    began: int
    ended: int

    def differs(self, other: _Told) -> bool:
        """Whether both have one part, and have written other values there."""
        apart = abs(self.value - other.value) > NEAR * max(self.norm, other.norm)
        return self.part == other.part and apart

    def drawn_as(self, other: _Told) -> bool:
        """Whether the same random numbers were written into two parts."""
        if self.part == other.part or 0.0 in self.form:
            return False
        return _alike(self.form, other.form)

    def drawn_beside(self, other: _Told) -> bool:
        """Whether two ranks with other parts began to draw at one place, and ended at two."""
        same = self.part != other.part and self.began == other.began
        return same and self.began != 0 and self.ended != other.ended


class DrawnWeights:
    """Looks at a rank's weights, and at torch's generator, from one step or update to the next.

    Args:
        weights: those that the rank trains, by name.
        parts: of each, in words, which part the rank has; the same words on all ranks that have it.
        parted: whether ranks have parts of what is trained.
    """

    def __init__(
        self, weights: Mapping[str, nn.Parameter], parts: Mapping[str, str], *, parted: bool
    ) -> None:
        several = [name for name, one in weights.items() if one.numel() >= ENTRIES]
        matrices = [name for name in several if weights[name].ndim > 1]
        chosen = {*matrices[: OF - 2], *several[:2]}
        self._weights = {name: weights[name] for name in several if name in chosen}
        self._parts = {_hash(f"{name} {parts.get(name, '')}"): name for name in self._weights}
        self._parted = parted
        self.note()

    @torch.no_grad()
    def note(self) -> None:
        """Take the weights and the generator as they are: a step has run, or an update."""
        self._seen, self._began = self._now(), _generator(self._weights.values())

    @torch.no_grad()
    def numbers(self) -> tuple[int, ...]:
        """What the rank tells of itself, as integers of 64 bits."""
        seen, now = torch.stack([self._seen, self._now()]).cpu()  # one wait for a GPU
        part, row = next(
            ((p, row) for row, p in enumerate(self._parts) if not torch.equal(seen[row], now[row])),
            (0, 0),
        )
        if not part:
            return (0,) * WIDTH
        began, ended = self._began, _generator(self._weights.values())
        moved = began != ended
        value = float((now[row] * torch.arange(1, ENTRIES + 1)).sum())
        before, form = _form(seen[row]), _form(now[row])
        if not moved or _alike(before, form):  # as of layers that were copies, and are made smaller
            form = 0.0, 0.0
        floats = struct.pack("<4d", value, float(now[row].norm()), *form)
        places = (_hash(f"{began} {torch.initial_seed()}"), _hash(ended)) if moved else (0, 0)
        return part, *struct.unpack("<4q", floats), *places

    def check(self, told: Sequence[Sequence[int]]) -> None:
        """Look at what all ranks have told, by rank (`numbers`).

        Raises:
            ModelError: two have written other values of what both have; or, where ranks have parts,
                the same random numbers, or not as many of them, for two parts.
        """
        ranks = {tuple(of_rank): rank for rank, of_rank in reversed([*enumerate(told)])}
        heard = sorted((rank, _heard(of_rank)) for of_rank, rank in ranks.items() if of_rank[0])
        for (rank, one), (peer, other) in combinations(heard, 2):
            who, what = f"ranks {rank} and {peer}", self._named(one, other)
            if one.differs(other):
                raise ModelError(
                    f"{who} have the same weights, and have written other values into them since "
                    f"the last update{what}: they would train apart",
                    hint="does each rank draw its own random numbers? Call torch.manual_seed(0) on "
                    "every rank before; or give all of them the same: pipe.load_state_dict(...)",
                )
            if self._parted and (one.drawn_as(other) or one.drawn_beside(other)):
                raise ModelError(
                    f"{who} have written random numbers into their weights since the last update"
                    f"{what}, each for its own part of the model, by the same seed: plain PyTorch "
                    "draws for all of it",
                    hint=_HINT,
                )

    def _now(self) -> Tensor:
        """The first entries of each weight: float64 [weights, ENTRIES]."""
        some = [one.detach().reshape(-1)[:ENTRIES] for one in self._weights.values()]
        real = [torch.view_as_real(one)[:, 0] if one.is_complex() else one for one in some]
        return torch.stack([one.double() for one in real]) if real else torch.empty(0)

    def _named(self, *of: _Told) -> str:
        """The weights that this rank has, in brackets."""
        names = [repr(self._parts[one.part]) for one in of if one.part in self._parts]
        return f" ({', '.join(dict.fromkeys(names))})" if names else ""


def _heard(told: Sequence[int]) -> _Told:
    value, norm, *form = struct.unpack("<4d", struct.pack("<4q", *told[1:5]))
    return _Told(told[0], value, norm, (form[0], form[1]), told[5], told[6])


def _form(entries: Tensor) -> tuple[float, float]:
    """Two numbers that any mean and any scale of the entries leave; 0: they are in an order, or
    some are the same, as no random numbers are."""
    steps = entries.diff()
    ordered = bool((steps >= 0).all() or (steps <= 0).all())
    if ordered or not bool(entries.isfinite().all()) or bool((steps == 0).any()):
        return 0.0, 0.0
    return float(steps[1] / steps[0]), float(steps[2] / steps[0])


def _alike(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return not any(differ(*pair, NEAR) for pair in zip(one, other, strict=True))


def _generator(weights: Iterable[Tensor]) -> str:
    """Where the generators stand that draw for these weights."""
    states = [torch.get_rng_state()]
    for device in {one.device for one in weights if one.is_cuda}:
        states.append(torch.cuda.get_rng_state(device))
    joined = b"".join(state.numpy().tobytes() for state in states)
    return hashlib.blake2b(joined, digest_size=8).hexdigest()


def _hash(words: str) -> int:
    """A number above 0."""
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 or 1
