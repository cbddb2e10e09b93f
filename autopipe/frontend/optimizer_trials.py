"""Steps of an optimizer on small parameters, by gradients that show what it changes together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.frontend.optimizer import ByName, Elsewhere, MakeOptimizer, Settings, settings_of

Like = Mapping[str, Tensor]

SPREAD = 0.1
"""The deviation of parameters' values. Where they are as large as 1, decay hides the rest of a
change, and norms are past the limits that optimizers have for them."""

SCALES = ((1.0, 1.0, 1.0), (4.0, 0.25, 1.0), (0.25, 4.0, 1.0), (1.0, 4.0, 1e-3), (4.0, 1.0, 1e3))
"""Of each step how many times as large gradients are in the first half of a parameter's rows, in
that of its columns, and as a whole. Adam's change is the same whatever one factor all gradients
have: it must not be the same in each step, or a norm that they are clipped by is not seen. At the
first step, a momentum has no past that differs. A norm may have a least value or a largest."""

OUTWARD, ACROSS = 0, 1
"""The step whose gradients make weights larger, which some optimizers look for before they compare
norms; and the one whose gradients are across the weights, row by row, as behind a norm layer: AdamP
takes the part along the weights out of a change there, and by the whole matrix."""

COUNTED, FAR = 4, 9_994
"""Steps that show which numbers count them, and where those are put then: what an optimizer does
in every 1000th step (a preconditioner is made anew) it does six steps later, by a large gradient,
which the momentum of earlier ones does not hide."""

APART, ROUNDING = 0.004, 2e-7
"""Two changes differ from this share of the largest on, and what a parameter's value is rounded to.
What changes elements by themselves makes equal bits of them, but for the last of a vector."""


@dataclass(frozen=True)
class Steps:
    """What an optimizer has done.

    Attributes:
        changes: the change that each step has made in each parameter.
        gradients: those that it had.
        settings: its settings for each parameter before the first step.
    """

    changes: list[Like]
    gradients: list[Like]
    settings: Settings


def drawn(like: Like) -> tuple[dict[str, Tensor], list[Like]]:
    """Values of parameters, and for each of `SCALES` a gradient of each; the same every time.

    A gradient's mean is not 0, and it is of another size than other parameters'.
    """
    draw = torch.Generator().manual_seed(0)

    def normal(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, dtype=tensor.dtype, generator=draw)

    def gradient(value: Tensor, scales: tuple[float, float, float]) -> Tensor:
        size = scales[2] * 4.0 ** float(torch.rand((), generator=draw) * 2 - 1)
        found: Tensor = size * (normal(value) + 0.5)
        for dim, scale in zip(range(value.ndim), scales[:2], strict=False):
            found.narrow(dim, 0, value.shape[dim] // 2).mul_(scale)
        return found

    values = {name: SPREAD * normal(tensor) for name, tensor in like.items()}
    return values, [{n: gradient(v, each) for n, v in values.items()} for each in SCALES]


def _aimed(step: int, gradient: Tensor, weight: Tensor) -> Tensor:
    """A gradient in the direction that this step's have."""
    if step == OUTWARD:
        return gradient - gradient.abs().mean() / SPREAD * weight
    if step != ACROSS or weight.numel() < 2:
        return gradient
    several = weight.ndim > 1 and weight[0].numel() > 1
    dims = [*range(int(several), weight.ndim)]
    along = (gradient * weight.conj()).sum(dims, keepdim=True)
    return gradient - weight * along / weight.abs().square().sum(dims, keepdim=True)


def half(tensors: Like, dim: int, which: int) -> dict[str, Tensor]:
    """Half of each tensor along `dim`; with three rows or fewer, all of it: a half has two."""
    return {
        name: tensor.chunk(2, dim)[which] if tensor.ndim > dim and tensor.shape[dim] > 3 else tensor
        for name, tensor in tensors.items()
    }


def stepped(
    make: MakeOptimizer,
    values: Like,
    gradients: Sequence[Like],
    elsewhere: Elsewhere | None = None,
    *,
    aims: bool = False,
    far: bool = False,
) -> Steps:
    """Make a step by each of the gradients, from parameters of these values.

    Args:
        elsewhere: watches the steps.
        aims: whether gradients are turned as `OUTWARD` and `ACROSS` say.
        far: whether its counters of steps are moved to `FAR` after the first `COUNTED`.
    """
    named, optimizer = made(make, values)
    seen: list[dict[tuple[int, Any], tuple[dict[Any, Any], float]]] = []
    if elsewhere is not None:
        elsewhere.begin(named.values(), optimizer)
    found = Steps([], [], settings_of(optimizer, named.items()))
    for number, step in enumerate(gradients):
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        given = {n: _aimed(number, g, before[n]) for n, g in step.items()} if aims else step
        for name, parameter in named.items():  # a copy: a step may clip gradients where they are
            parameter.grad = given[name].contiguous().clone()
        with nullcontext() if elsewhere is None else elsewhere:
            optimizer.step()
        found.changes.append({name: p.detach() - before[name] for name, p in named.items()})
        found.gradients.append(given)
        if far and number < COUNTED:
            seen.append({(id(h), key): (h, number) for h, key, number in _numbers(optimizer)})
            if len(seen) == COUNTED:
                _move(seen, FAR - COUNTED)
    return found


def _numbers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[Any, Any], Any, float]]:
    """The numbers that an optimizer, or one that it wraps, keeps: the dict, the key, the value."""
    for kept in vars(optimizer).values():
        if isinstance(kept, torch.optim.Optimizer):
            yield from _numbers(kept)
    states: dict[Any, Any] = optimizer.state  # it may have a number for a key of its own
    named = (state for state in states.values() if isinstance(state, dict))
    for holder in (vars(optimizer), *optimizer.param_groups, states, *named):
        for key, value in holder.items():
            single = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
            if single or (isinstance(value, int | float) and not isinstance(value, bool)):
                yield holder, key, float(value)


def _move(seen: Sequence[Mapping[Any, tuple[dict[Any, Any], float]]], steps: int) -> None:
    """Add steps to each number that was one more after each step: it counts them."""
    for place, (holder, _) in seen[-1].items():
        values = [numbers[place][1] for numbers in seen if place in numbers]
        if values == [values[0] + n for n in range(len(seen))]:
            holder[place[1]] = holder[place[1]] + steps


def differ(
    found: Sequence[Like], expected: Sequence[Like], names: Collection[str] | None = None
) -> bool:
    """Whether changes differ beyond rounding in one of the names; None: in any."""
    for mine, theirs in zip(found, expected, strict=True):
        for name in mine if names is None else names:
            most = APART * theirs[name].abs().max() + ROUNDING
            if bool(((mine[name] - theirs[name]).abs() > most).any()):
                return True
    return False


def made(
    make: MakeOptimizer, values: Like
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Parameters of these values, by name, and the optimizer of them."""
    named = {name: nn.Parameter(value.contiguous().clone()) for name, value in values.items()}
    if isinstance(make, ByName):
        return named, make.by_name([*named.items()])
    return named, make([*named.values()])
