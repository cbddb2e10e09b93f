"""Finds scripts that write random numbers into weights or gradients, of which each rank has others.

    for p in pipe.parameters(): nn.init.xavier_uniform_(p)
    p.grad += 0.01 * torch.randn_like(p)

    ZeRO, tp  each rank draws the same numbers for its rows or columns, with a fan of these alone
    stages    each rank draws from the beginning of the generator's numbers
    replicas  a rank that draws others than the next one trains apart from it

Plain PyTorch draws for whole weights, one after the other. So ranks tell each other, before a step,
how the first weight begins that was written since an update, what was added there, and where
torch's generator stands. Noise by a generator of a rank's own is let be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.runtime.script.own_numbers import as_floats, as_integers, differ

OF, ENTRIES = 6, 8
"""So many weights are looked at, at so many of their first entries: numbers that two ranks draw
from one state of a generator are alike there, however many they draw."""

NEAR = 1e-3
"""Shares of a number: two that differ by less are one."""

RATIOS = 4
"""So many make a form. By chance those of two ranks are one in 1e-13 of all steps."""

WIDTH = 6 + 2 * RATIOS
"""The numbers that a rank tells of itself."""

_Form = tuple[float, ...]

_HINT = (
    "initialise the module before autopipe.parallelize; or, later, a whole new one on each rank by "
    "the same seed: pipe.load_state_dict(new.state_dict()). Noise is drawn by a generator with "
    "another seed for each part, and one for copies: torch.Generator().manual_seed(part)"
)


_NO: _Form = (0.0,) * RATIOS
"""In the place of a form: no random numbers."""


@dataclass(frozen=True)
class _Told:
    """What a rank tells of the first weight, or gradient, that was written.

    Attributes:
        part: a hash of the weight, and of which part of it the rank has; 0: none was written.
        shared: a hash of the names of all that were written and that the rank has whole; 0: none.
        value, norm: of the first entries of these a weighted sum, and the norm.
        form, added: two numbers (`_form`) of the first weight's entries, and of what was added to
            them, which are the same whatever their mean and their scale; 0: they are not drawn.
        began, ended: of entries that are new altogether, hashes of where the generator was when the
            rank looked last, and is now; 0: it has not moved.
    """

    part: int
    shared: int
    value: float
    norm: float
    form: _Form
    added: _Form
    began: int
    ended: int

    def differs(self, other: _Told) -> bool:
        """Whether both have written the same, and other values there."""
        apart = abs(self.value - other.value) > NEAR * max(self.norm, other.norm)
        return self.shared == other.shared and self.shared != 0 and apart

    def drawn_as(self, other: _Told) -> bool:
        """Whether the same random numbers were written into two parts, or added to them."""
        pairs = (self.form, other.form), (self.added, other.added)
        return self.part != other.part and any(
            0.0 not in one and _alike(one, o) for one, o in pairs
        )

    def drawn_beside(self, other: _Told) -> bool:
        """Whether two ranks with other parts began to draw at one place, and ended at two."""
        same = self.part != other.part and self.began == other.began
        return same and self.began != 0 and self.ended != other.ended


class DrawnNumbers:
    """Looks at a rank's weights or gradients, and at torch's generator, from one step or update to
    the next.

    Args:
        weights: those that the rank trains, by name.
        parts: of each, in words, which part the rank has; the same words on all ranks that have it.
        parted: whether ranks have parts of what is trained.
        what: `weights` or `gradients`: which are looked at.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        parts: Mapping[str, str],
        *,
        parted: bool,
        what: str = "weights",
    ) -> None:
        several = [name for name, one in weights.items() if one.numel() >= ENTRIES]
        matrices = [name for name in several if weights[name].ndim > 1]
        chosen = {*matrices[: OF - 2], *several[:2]}
        self._weights = {name: weights[name] for name in several if name in chosen}
        self._parts = {_hash(f"{name} {parts.get(name, '')}"): name for name in self._weights}
        self._whole = [not parts.get(name, "").strip() for name in self._weights]
        self._shared: dict[int, str] = {}
        self._parted, self._what = parted, what
        self.note()

    @torch.no_grad()
    def note(self) -> None:
        """Take all as it is: a step has run, or an update."""
        if self._weights:
            self._seen, self._began = self._now(), _generator(self._weights.values())

    @torch.no_grad()
    def numbers(self) -> tuple[int, ...]:
        """What the rank tells of itself, as integers of 64 bits."""
        if not self._weights:
            return (0,) * WIDTH
        seen, now = torch.stack([self._seen, self._now()]).cpu()  # one wait for a GPU
        written = (seen != now).any(-1).nonzero().flatten().tolist()
        if not written:
            return (0,) * WIDTH
        row, whole = written[0], [row for row in written if self._whole[row]]
        names = [*self._weights]
        shared = ", ".join(repr(names[row]) for row in whole)
        self._shared = {_hash(shared): shared} if shared else {}
        began, ended = self._began, _generator(self._weights.values())
        value = float((now[whole] * torch.arange(1, ENTRIES + 1, device="cpu")).sum())
        # Layers may have begun as copies of each other: their forms tell nothing, nor do those of
        # what is computed of weights and gradients alone, as decay, or an update by hand.
        others = self._gradients() if self._what == "weights" else self._weights.values()
        known = [_form(seen[row]), _form(self._of(others)[row])]
        forms = [_form(now[row]), _form(now[row] - seen[row])]
        known += [tuple(-ratio for ratio in one) for one in known]
        told = [
            f if began != ended and not any(_alike(f, k) for k in known) else _NO for f in forms
        ]
        new = self._what == "weights" and (now[row] - seen[row]).norm() > seen[row].norm() / 2
        floats = value, float(now[whole].norm()), *told[0], *told[1]
        places = (_hash(f"{began} {torch.initial_seed()}"), _hash(ended))
        moved = places if new and began != ended else (0, 0)
        part = [*self._parts][row]
        return part, next(iter(self._shared), 0), *as_integers(floats), *moved

    def check(self, told: Sequence[Sequence[int]]) -> None:
        """Look at what all ranks have told, by rank (`numbers`).

        Raises:
            ModelError: two have written other values of what both have; or, where ranks have parts,
                the same random numbers, or not as many of them, for two parts.
        """
        ranks = {tuple(of_rank): rank for rank, of_rank in reversed([*enumerate(told)])}
        heard = [(rank, _heard(of_rank)) for of_rank, rank in ranks.items() if any(of_rank[1:])]
        for (rank, one), (peer, other) in map(sorted, _pairs(heard)):
            who, what = f"ranks {rank} and {peer}", self._named(one, other)
            if one.differs(other):
                names = self._shared.get(one.shared, "")
                raise ModelError(
                    f"{who} have the same weights, and have written other values into their "
                    f"{self._what} since the last update{f' ({names})' if names else ''}: they "
                    "would train apart",
                    hint="does each rank draw its own random numbers? Call torch.manual_seed(0) on "
                    "every rank before; or give all of them the same: pipe.load_state_dict(...)",
                )
            if self._parted and (one.drawn_as(other) or one.drawn_beside(other)):
                raise ModelError(
                    f"{who} have written random numbers into their {self._what} since the last "
                    f"update{what}, each for its own part of the model, by the same seed: plain "
                    "PyTorch draws for all of it",
                    hint=_HINT,
                )

    def _now(self) -> Tensor:
        return self._of(self._weights.values() if self._what == "weights" else self._gradients())

    def _gradients(self) -> list[Tensor | None]:
        return [one.grad for one in self._weights.values()]

    def _of(self, tensors: Iterable[Tensor | None]) -> Tensor:
        """The first entries of each: float64 [weights, ENTRIES]; zeros: there are none."""
        found = [_first(one) for one in tensors]
        if any(one is None for one in found):
            nothing = torch.zeros(ENTRIES, device=next(iter(self._weights.values())).device)
            found = [nothing if one is None else one for one in found]
        some = [one for one in found if one is not None]
        alike = len({one.dtype for one in some}) == 1
        return torch.stack(some if alike else [one.double() for one in some]).double()

    def _named(self, *of: _Told) -> str:
        """The weights that this rank has, in brackets."""
        names = [repr(self._parts[one.part]) for one in of if one.part in self._parts]
        return f" ({', '.join(dict.fromkeys(names))})" if names else ""


def _heard(told: Sequence[int]) -> _Told:
    """What a rank tells, from its integers (`DrawnNumbers.numbers`)."""
    part, shared, *integers, began, ended = told
    value, norm, *forms = as_floats(integers)
    form, added = tuple(forms[:RATIOS]), tuple(forms[RATIOS:])
    return _Told(part, shared, value, norm, form, added, began, ended)


_Heard = tuple[int, _Told]


def _pairs(heard: Sequence[_Heard]) -> Iterator[tuple[_Heard, _Heard]]:
    """The pairs of ranks that are compared: a few of each rank, where all would be too many.

    Of ranks that have written the same, or that began to draw at one place, each one and the first;
    of forms, which are numbers, neighbours in order.
    """
    for of in ("shared", "began"):
        groups: dict[int, list[_Heard]] = {}
        for one in heard:
            groups.setdefault(getattr(one[1], of), []).append(one)
        for first, *others in (group for key, group in groups.items() if key):
            unlike = [other for other in others if other[1].part != first[1].part]
            yield from ((first, other) for other in others)
            yield from ((unlike[0], other) for other in others if unlike and other != unlike[0])
    yield from pairwise(sorted(heard, key=lambda one: (one[1].form, one[0])))
    yield from pairwise(sorted(heard, key=lambda one: (one[1].added, one[0])))


def _first(tensor: Tensor | None) -> Tensor | None:
    """Its first entries in memory, in which numbers are drawn."""
    if tensor is None or tensor.layout != torch.strided:
        return None
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    first = tensor.reshape(-1)[:ENTRIES]
    return torch.view_as_real(first.resolve_conj())[:, 0] if first.is_complex() else first


def _form(entries: Tensor) -> _Form:
    """Ratios of differences between entries; another mean or scale leaves them as they are.

    Zeros: the entries ascend or descend, two neighbours are equal, or one is not finite. No random
    numbers are so.
    """
    steps = entries.diff()
    ordered = bool((steps >= 0).all() or (steps <= 0).all())
    if ordered or not bool(entries.isfinite().all()) or bool((steps == 0).any()):
        return _NO
    # The gradients of two opposite classes have opposite signs, and are drawn by nobody.
    return tuple((steps[1 : 1 + RATIOS] / steps[0].abs()).tolist())


def _alike(one: _Form, other: _Form) -> bool:
    """Whether two forms are one, but for rounding."""
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
