"""Odd models of self-supervised and reinforcement learning: views, teachers, running means, merged
adapters."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.odd.common import WIDTH, Net, odd


@odd()
class TwoViews(Net):
    """Two views of each row go through the layers as one batch, and are taken apart (SimCLR)."""

    def inside(self, hidden: Tensor) -> Tensor:
        one, other = self.first(torch.cat([hidden, hidden.flip(-1)])).chunk(2)
        return F.normalize(one, dim=-1) - F.normalize(other, dim=-1)


class _Mean(nn.Module):
    """The mean of all that it has seen; nobody calls the module itself."""

    mean: Tensor
    count: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))

    def update(self, x: Tensor) -> None:
        count = self.count + x.shape[0]
        self.mean = self.mean + (x.mean(0) - self.mean) * (x.shape[0] / count).float()
        self.count = count


@odd()
class RunningObservations(Net):
    """A mean of observations that a method updates, as PPO keeps it."""

    def begin(self) -> None:
        self.seen = _Mean(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Of x as far as it is off the mean of what came before."""
        self.seen.update(x)
        return super().forward((x - self.seen.mean).clamp(-5, 5))


@odd()
class TableBesideRegion(Net):
    """A table for a size, made in a first call, beside what runs as it is, as in YOLO."""

    def begin(self) -> None:
        self.size = 0

    def inside(self, hidden: Tensor) -> Tensor:
        if self.size != hidden.shape[-1]:
            self.size = hidden.shape[-1]
            places = torch.arange(self.size, dtype=hidden.dtype, device=hidden.device)
            self.table = places / self.size
        made: Tensor = torch.vmap(torch.sin)(self.first(hidden)) + self.table
        return made


@odd()
class TeacherBesideRegion(Net):
    """A teacher that follows, beside what runs as it is."""

    def begin(self) -> None:
        self.teacher = copy.deepcopy(self.first).requires_grad_(False)

    def inside(self, hidden: Tensor) -> Tensor:
        for own, other in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.detach(), alpha=0.1)
        return torch.vmap(torch.tanh)(self.first(hidden)) - self.teacher(hidden).sigmoid()


@odd()
class MergedLowRank(Net):
    """Adapters of some columns alone, in a mask that is made like the weight, as loralib has it."""

    def begin(self) -> None:
        self.second.weight.requires_grad_(False)
        self.down_to = nn.Parameter(torch.randn(2, 16) * 0.1)
        self.up_from = nn.Parameter(torch.randn(10, 2) * 0.1)
        self.adapted = self.second.weight.new_zeros(16, dtype=torch.bool)
        self.adapted[[0, 1, 2, 3, 4, 8, 9, 10, 11, 12]] = True

    def padded(self, part: Tensor) -> Tensor:
        """The part in its rows, and zeros in all others."""
        whole = part.new_zeros(16, 16)
        whole[self.adapted] = part
        return whole

    def inside(self, hidden: Tensor) -> Tensor:
        return hidden + hidden @ self.padded(self.up_from @ self.down_to).T


@odd()
class FourierFeatures(Net):
    """Random features in a plain attribute, and an order in a list, drawn after the weights."""

    def begin(self) -> None:
        self.directions = 0.5 * torch.randn(16, 8)
        self.order = torch.randperm(16).tolist()

    def inside(self, hidden: Tensor) -> Tensor:
        angles = hidden[:, self.order] @ self.directions
        return torch.cat([angles.cos(), angles.sin()], -1)


@odd()
class PatchedForward(Net):
    """A layer whose forward is a function around the one before, with a hook on gradients."""

    def begin(self) -> None:
        before = self.second.forward
        self.second.forward = lambda x: before(2 * x) + x  # type: ignore[method-assign]
        self.second.register_full_backward_hook(lambda m, found, given: (0.5 * found[0],))


class _Centred(nn.Module):
    """Off the mean of what all layers have seen."""

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., 16] -> the same."""
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.layer(x - self.mean).tanh()  # type: ignore[no-any-return]


@odd()
class SharedStatistic(Net):
    """One buffer that three layers write and read."""

    def begin(self) -> None:
        mean = torch.zeros(16)
        self.layers = nn.Sequential(*(_Centred(mean) for _ in range(3)))

    def inside(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.layers(hidden)
        return made
