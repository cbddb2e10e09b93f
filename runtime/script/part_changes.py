"""Finds a script that changes gradients or weights by a mean, a norm or a quantile of what is only
a part on this rank.

    for p in pipe.parameters(): p.grad -= p.grad.mean()              ZeRO: the mean of some rows
    p.grad -= p.grad.mean(dim=1, keepdim=True)                       tp: of some columns
    p.grad /= p.grad.norm()                                          either
    p.data /= p.data.norm()                                          of a weight, after the update
    p.data *= p.abs() >= p.abs().median()                            the smaller half of a part
    SGD([{"params": [p], "lr": 0.1 / p.shape[-1]} for p in ...])     a rate by a part's shape

Plain PyTorch takes them of the whole gradient. What was done is seen by what it left: differences
that are the same all along a dim, and means of 0; or factors that are, and norms of one size; or
zeros in place of the smallest, in each part as large a share: by a size for all of a weight, ranks
would have others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopipe.errors import ModelError

ENTRIES, OF = 8, 4
"""So many entries of each dim of so many gradients are looked at."""

_ROUNDING, _CENTRED = 1e-5, 1e-2

_ORDERED = 0.9
"""What share of the zeros that chance would not put in place of the smallest has to be there."""

_CUT = 3
"""So many gradients, or weights, with zeros in the same share are no chance."""


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
            ModelError: by a mean, a norm or a quantile of a part.
        """
        zeros = dict[str, tuple[int, int]]()
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
            if _cut_off(before, some):
                zeros[name] = int((after == 0).sum()), after.numel()
        if len(zeros) >= _CUT and (share := _one_share(zeros.values())):
            names = ", ".join(map(repr, zeros))
            raise ModelError(
                f"the {self._what}s of {names} were set to 0 where they are smallest, a share of "
                f"{share:.3g} of each, of which this rank has a part: plain PyTorch chooses the "
                "smallest of all of it",
                hint="plan with --zero 0 and --tp 1, where a rank has all of it",
            )

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


_BY_SHAPE: dict[str, Callable[[torch.Size], float]] = {
    "p.shape[-1]": lambda shape: shape[-1],
    "p.shape[0]": lambda shape: shape[0],
    "p.numel()": lambda shape: shape.numel(),
    "max(p.shape)": max,
    "p.shape[0] / p.shape[-1]": lambda shape: shape[0] / shape[-1],
}
"""Numbers of a shape by which scripts divide or multiply rates, or by their roots."""


def check_rates(
    optimizer: Optimizer, parts: Mapping[int, str], whole: Mapping[str, torch.Size]
) -> None:
    """Look at the rates of an optimizer's groups.

    Args:
        parts: the names of the rank's own parameters, by their identity.
        whole: the shapes of these in the model, by name.

    Raises:
        ModelError: they go with the shapes of parts, and not with those of whole parameters. If
            they go with both, each of which is half as long, it is a warning.
    """
    found = list[tuple[float, dict[str, torch.Size]]]()
    for group in optimizer.param_groups:
        named = ((parts.get(id(p), ""), p) for p in group["params"])
        # Of a number, or a short vector, some ranks have a part without elements.
        own = {name: p.shape for name, p in named if p.numel() and whole.get(name)}
        if own and isinstance(rate := group.get("lr"), float) and rate > 0:
            found.append((rate, own))
    for words, number in _BY_SHAPE.items():
        for power in (-1.0, -0.5, 0.5, 1.0):
            mine = _per_number(number, power, [(rate, [*own.values()]) for rate, own in found])
            if mine is None:
                continue
            parted = [pair for _, own in found for pair in own.items() if pair[1] != whole[pair[0]]]
            theirs = _per_number(number, power, [(r, [whole[n] for n in own]) for r, own in found])
            if not parted or theirs == mine:
                continue
            (name, part), *_ = parted
            root = "the root of " if abs(power) < 1 else ""
            told = (
                f"the rates of {type(optimizer).__name__}'s groups go with {root}{words}, of the "
                f"parts that this rank has: {[*part]} of {name!r}, which is {[*whole[name]]}"
            )
            hint = (
                "take the shapes of the module that was given to autopipe.parallelize: "
                "dict(model.named_parameters())[name].shape"
            )
            if theirs is None:
                raise ModelError(told, hint=hint)
            if _is_round(mine) or not _is_round(theirs):
                warnings.warn(
                    f"{told}. They go with the whole shapes, too, as {theirs:.4g} of them and not "
                    f"{mine:.4g}; if they were made of parts, {hint}",
                    stacklevel=1,
                )
            return


def _is_round(number: float) -> bool:
    """Whether a person may have written it: 0.1 and 0.025, not 0.0707."""
    return abs(float(f"{number:.2g}") - number) <= _ROUNDING * number


def _per_number(
    number: Callable[[torch.Size], float],
    power: float,
    groups: Sequence[tuple[float, Sequence[torch.Size]]],
) -> float | None:
    """What rates are for each such number of a shape; None: they do not go with it."""
    numbers = [{number(shape) for shape in shapes} for _, shapes in groups]
    if any(len(one) > 1 for one in numbers) or len({n for one in numbers for n in one}) < 2:
        return None
    each = [rate / one.pop() ** power for (rate, _), one in zip(groups, numbers, strict=True)]
    return each[0] if max(each) - min(each) <= _ROUNDING * max(each) else None


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


def _cut_off(before: Tensor, after: Tensor) -> bool:
    """Whether the smallest entries, and next to no others, are zeros now; others are as before."""
    sizes, gone = before.abs().flatten(), (after == 0).flatten()
    count = int(gone.sum())
    if not 0 < count < gone.numel() or bool((before.flatten()[gone] == 0).all()):
        return False
    smallest = torch.zeros_like(gone)
    smallest[sizes.argsort()[:count]] = True
    share = count / gone.numel()
    right = int((smallest & gone).sum()) / count
    return right >= share + _ORDERED * (1 - share) and torch.equal(
        before[after != 0], after[after != 0]
    )


def _one_share(zeros: Iterable[tuple[int, int]]) -> float:
    """The share of zeros in all of these, if it is one; 0: it is not."""
    counts = sorted(zeros, key=lambda one: one[0] / one[1])
    number, of = counts[len(counts) // 2]
    share = number / of
    return share if all(abs(n - share * size) <= 1.5 for n, size in counts) else 0.0


def _spread(values: Tensor) -> float:
    """The share by which values differ."""
    return float((values.max() - values.min()) / values.abs().max())
