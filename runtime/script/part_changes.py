"""Finds a script that changes gradients or weights by a mean or a norm of what is only a part on
this rank.

    for p in pipe.parameters(): p.grad -= p.grad.mean()              ZeRO: the mean of some rows
    p.grad -= p.grad.mean(dim=1, keepdim=True)                       tp: of some columns
    p.grad /= p.grad.norm()                                          either
    p.data /= p.data.norm()                                          of a weight, after the update

Plain PyTorch takes them of the whole gradient. What was done is seen by what it left: differences
that are the same all along a dim, and means of 0; or factors that are, and norms of one size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from autopipe.errors import ModelError

ENTRIES, OF = 8, 4
"""So many entries of each dim of so many gradients are looked at."""

_ROUNDING, _CENTRED = 1e-5, 1e-2


class PartChanges:
    """Looks at gradients, or at weights, of which this rank has a part.

    Args:
        parted: for each parameter the dims that the rank has a part of, by name.
        what: `gradient` or `weight`.
    """

    def __init__(self, parted: Mapping[str, Iterable[int]], what: str = "gradient") -> None:
        self._what = what
        self._parted = {name: frozenset(dims) for name, dims in parted.items() if dims}
        self._noted: dict[str, Tensor] = {}
        self._norms: dict[str, tuple[float, float]] = {}

    def note(self, gradients: Mapping[str, Tensor]) -> None:
        """Take the gradients as they are for those of the step, or weights for the optimizer's."""
        own = [name for name in self._parted if name in gradients]
        largest = sorted(own, key=lambda name: gradients[name].numel())[-OF:]
        self._noted = {name: _some(gradients[name]).clone() for name in largest}

    @torch.no_grad()
    def check(self, gradients: Mapping[str, Tensor]) -> None:
        """Look at the gradients that an optimizer is about to use; some were changed.

        Raises:
            ModelError: by a mean or a norm of a part.
        """
        for name, before in self._noted.items():
            after = gradients.get(name)
            if after is None or before.shape != (some := _some(after)).shape:
                continue
            if torch.equal(some, before):  # one wait for a GPU, and not several
                continue
            parted = self._parted[name]
            rounding = max(_ROUNDING, 4 * torch.finfo(after.dtype).eps)
            over = _alike(some - before, before, rounding)
            if over & parted and _centred(after, over, some - before, rounding):
                raise self._error(name, over & parted, "mean")
            over = _alike(some / before, torch.ones_like(before), rounding)
            if over & parted and self._scaled(name, after, over, some / before, rounding):
                raise self._error(name, over & parted, "norm")

    def _error(self, name: str, dims: Iterable[int], by: str) -> ModelError:
        words = " and ".join(map(str, sorted(dims)))
        return ModelError(
            f"the {self._what} of {name!r} was changed by its {by} over dim {words}, of which this "
            f"rank has a part: plain PyTorch takes the {by} of all of it",
            hint="plan with --zero 0 and --tp 1, where a rank has all of it",
        )

    def _scaled(
        self, name: str, after: Tensor, over: frozenset[int], factors: Tensor, rounding: float
    ) -> bool:
        """Whether factors that are alike over these dims have left norms of one size there."""
        norms = torch.linalg.vector_norm(after.float(), dim=sorted(over), keepdim=True)
        if norms.numel() > 1:
            rows = _some(norms).flatten()
            of_rows = factors.float().mean(dim=sorted(over), keepdim=True).flatten()
            rows, of_rows = (one[(of_rows - 1).abs() > rounding] for one in (rows, of_rows))
            return len(rows) > 2 and _spread(rows) <= 10 * rounding < _spread(of_rows)
        now = float(norms / factors.float().mean()), float(norms)
        last = self._norms.get(name)
        self._norms[name] = now
        if last is None or abs(now[0] - now[1]) <= rounding * now[1]:
            return False
        same = 0 < now[1] and abs(now[1] - last[1]) <= 10 * rounding * now[1]
        return same and abs(now[0] - last[0]) > 100 * rounding * now[0]


def _some(gradient: Tensor) -> Tensor:
    """Some entries of each dim, evenly taken, in float32."""
    for dim, size in enumerate(gradient.shape):
        step = size // ENTRIES | 1
        places = torch.arange(0, size, step, device=gradient.device)[: 2 * ENTRIES]
        gradient = gradient.detach().index_select(dim, places)
    return gradient.float()


def _alike(change: Tensor, scale: Tensor, rounding: float) -> frozenset[int]:
    """The dims over which a change is the same, and is not nothing."""
    size = float(scale.abs().max())
    if not bool(change.isfinite().all()):
        return frozenset()
    spreads = {
        dim: float((change.amax(dim) - change.amin(dim)).max())
        for dim in range(change.ndim)
        if change.shape[dim] > 1
    }
    return frozenset(dim for dim, spread in spreads.items() if spread <= rounding * size)


def _centred(after: Tensor, over: frozenset[int], change: Tensor, rounding: float) -> bool:
    """Whether a change that is the same over these dims has left a mean of 0 there."""
    moved = float(change.abs().mean())
    means = after.float().mean(dim=sorted(over))
    least = float(after.float().abs().mean()) * rounding
    return moved > least and float(means.abs().max()) <= _CENTRED * moved


def _spread(values: Tensor) -> float:
    """The share by which values differ."""
    return float((values.max() - values.min()) / values.abs().max())
