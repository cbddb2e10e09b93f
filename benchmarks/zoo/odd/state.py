"""Models that keep something from one call to the next, or change their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

from benchmarks.zoo.odd.common import WIDTH, Net, odd, square, vectors


@odd()
class Counter(Net):
    """Counts its calls in a buffer that is written in place, and divides by the count."""

    def begin(self) -> None:
        self.register_buffer("calls", torch.zeros(()))

    def inside(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return hidden / self.calls.clone()


@odd()
class RunningMean(Net):
    """A buffer that is assigned, not written."""

    def begin(self) -> None:
        self.register_buffer("mean", torch.zeros(16))

    def inside(self, hidden: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return hidden - self.mean


@odd()
class FirstCallCache(Net):
    """Fills an attribute at its first call."""

    def begin(self) -> None:
        self.cache: Tensor | None = None

    def inside(self, hidden: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.linspace(0, 1, 16, device=hidden.device)
        return hidden + self.cache


@odd()
class CacheByLength(Net):
    """Keeps tables in a dict by size, as rotary positions do."""

    def begin(self) -> None:
        self.tables: dict[int, Tensor] = {}

    def inside(self, hidden: Tensor) -> Tensor:
        size = hidden.shape[-1]
        if size not in self.tables:
            self.tables[size] = torch.arange(size, device=hidden.device).float().cos()
        return hidden * self.tables[size]


@odd()
class LazyBuffer(Net):
    """Registers a buffer in its first forward."""

    def inside(self, hidden: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer(
                "table", torch.ones(16, device=hidden.device) * 0.5, persistent=False
            )
        return hidden * self.table


@odd()
class HooksAtFirstCall(Net):
    """Registers hooks that collect hidden states in its first forward, and takes one by its place.

    As transformers does where a model asks for hidden states: a hook too many shifts all of them.
    """

    def begin(self) -> None:
        self.inner = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.seen: list[Tensor] = []

    def inside(self, hidden: Tensor) -> Tensor:
        if not hasattr(self, "hooked"):
            self.hooked = True
            for layer in self.inner:
                layer.register_forward_hook(lambda module, given, made: self.seen.append(made))
        self.seen.clear()
        for layer in self.inner:
            hidden = layer(hidden).tanh()
        taken = self.seen[-2]
        self.seen.clear()
        return hidden + taken


@odd()
class KeepsOutputs(Net):
    """Keeps its last hidden values in an attribute, for whoever looks."""

    def inside(self, hidden: Tensor) -> Tensor:
        self.last = hidden
        return hidden * 2


@odd()
class AppendsToList(Net):
    """Appends to a list that nobody empties."""

    def begin(self) -> None:
        self.seen: list[float] = []

    def inside(self, hidden: Tensor) -> Tensor:
        self.seen.append(hidden.detach().mean().item())
        return hidden


@odd()
class PythonCounter(Net):
    """Counts its calls in Python, and nothing depends on the count."""

    def begin(self) -> None:
        self.step = 0

    def inside(self, hidden: Tensor) -> Tensor:
        self.step += 1
        return hidden


@odd()
class ChangesItsBatch(Net):
    """Scales its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


def changing(outputs: Any, batch: Any) -> Tensor:
    """Changes the labels in place."""
    batch["y"].add_(1)
    return square(outputs, batch)


@odd(vectors, changing)
class LossChangesItsBatch(Net):
    """Its loss does that to the labels."""


class WeightedLoss(nn.Module):
    """A loss with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.arange(1.0, WIDTH + 1))

    def forward(self, outputs: Tensor, batch: Any) -> Tensor:
        """Weighted mean square."""
        return (self.weights * (outputs - batch["y"]) ** 2).mean()


@odd(vectors, WeightedLoss())
class LossWithBuffer(Net):
    """Its loss is a module with a buffer."""


@odd()
class Codebook(Net):
    """Moves a codebook towards what it saw, as VQ-VAE does, and passes gradients straight on."""

    def begin(self) -> None:
        self.register_buffer("codes", torch.randn(4, 16))
        self.register_buffer("sizes", torch.ones(4))

    def inside(self, hidden: Tensor) -> Tensor:
        nearest = torch.cdist(hidden, self.codes).argmin(-1)
        chosen = nn.functional.one_hot(nearest, 4).float()
        with torch.no_grad():
            self.sizes.mul_(0.9).add_(0.1 * chosen.sum(0))
            self.codes.lerp_(chosen.T @ hidden / self.sizes[:, None], 0.1)
        return hidden + (self.codes[nearest] - hidden).detach()


@odd()
class Momentum(Net):
    """A copy of a layer that follows it, as BYOL's teacher does."""

    def begin(self) -> None:
        self.teacher = nn.Linear(16, 16).requires_grad_(False)

    def inside(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(hidden)
        return hidden + (self.first(hidden) - target)


@odd()
class Annealed(Net):
    """Divides by a temperature that falls from one call to the next: backward reads it too."""

    def begin(self) -> None:
        self.register_buffer("temperature", torch.tensor(2.0))

    def inside(self, hidden: Tensor) -> Tensor:
        self.temperature.mul_(0.9)
        return (self.first(hidden) / self.temperature).softmax(-1)


@odd()
class Teacher(Net):
    """A frozen layer that follows a trained one, with a gradient through it, as in DINO."""

    def begin(self) -> None:
        self.teacher = nn.Linear(16, 16).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        """Nine tenths of what it was, and a tenth of what it follows."""
        pairs = zip(self.teacher.parameters(), self.first.parameters(), strict=True)
        for own, other in pairs:
            own.data.mul_(0.9).add_(other.detach(), alpha=0.1)

    def inside(self, hidden: Tensor) -> Tensor:
        self.follow()
        return self.teacher(hidden.tanh()) - hidden


class _Sparsely(nn.Module):
    """A layer for some rows, over a temperature that falls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [b, 16] -> the same."""
        self.temperature.mul_(0.9)
        rows = (hidden[:, 0] > 0).nonzero().flatten()
        made: Tensor = self.layer(hidden[rows]) / self.temperature
        return hidden.index_copy(0, rows, made)


@odd()
class AnnealedSparsely(Net):
    """The same, in a part that no trace can look into."""

    def begin(self) -> None:
        self.part = _Sparsely()

    def inside(self, hidden: Tensor) -> Tensor:
        return self.part(hidden)


@odd()
class NoneAtFirst(Net):
    """A buffer that is None until the first call fills it, as a causal mask often is."""

    def begin(self) -> None:
        self.register_buffer("scale", None, persistent=False)

    def inside(self, hidden: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.linspace(0.5, 2, hidden.shape[-1], device=hidden.device)
        return self.first(hidden) * self.scale


@odd()
class MovedByData(Net):
    """As MoCo's keys follow its queries: the data of a frozen layer is set."""

    def begin(self) -> None:
        self.teacher = nn.Linear(16, 16).requires_grad_(False)

    def inside(self, hidden: Tensor) -> Tensor:
        pairs = zip(self.teacher.parameters(), self.first.parameters(), strict=True)
        for own, other in pairs:
            own.data = own.data * 0.9 + other.data * 0.1
        return self.first(hidden) - self.teacher(hidden)


class _MaskedConv(nn.Conv1d):
    """A convolution of PixelCNN's: no tap sees what is to come."""

    def __init__(self) -> None:
        super().__init__(16, 16, 3, padding=1)
        self.register_buffer("mask", torch.tensor([1.0, 1.0, 0.0]).expand(16, 16, 3).clone())

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


@odd()
class MaskedTaps(Net):
    """As PixelCNN is written: each call masks the weights themselves, in their .data."""

    def begin(self) -> None:
        self.one, self.two = _MaskedConv(), _MaskedConv()

    def inside(self, hidden: Tensor) -> Tensor:
        seen = hidden[..., None].expand(*hidden.shape, 4).flatten(0, -3)
        return self.two(self.one(seen).relu()).mean(-1).reshape(hidden.shape)


@odd()
class LimitedNorms(Net):
    """As EEGNet is written: no row of the weight may have a norm of more than a half."""

    def begin(self) -> None:
        self.limited = nn.Linear(16, 16)

    def inside(self, hidden: Tensor) -> Tensor:
        weight = self.limited.weight
        weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.5)
        return self.limited(hidden)


@odd()
class Replay(Net):
    """An energy model: steps down its own gradient from samples in a buffer, and stores them."""

    def begin(self) -> None:
        self.register_buffer("samples", torch.randn(8, 16))

    def inside(self, hidden: Tensor) -> Tensor:
        sample = self.samples[: hidden.shape[-2]].detach()
        for _ in range(2):
            sample = sample.detach().requires_grad_(True)
            energy = self.second(sample).tanh().sum()
            sample = sample - 0.1 * torch.autograd.grad(energy, sample)[0]
        sample = sample.detach()
        self.samples[: hidden.shape[-2]] = sample
        return hidden - self.second(sample).tanh().mean(0)


@odd()
class FakeQuantized(Net):
    """Quantized in training by torch.ao, whose observers have seen a first batch."""

    def begin(self) -> None:
        self.quantize = FakeQuantize(
            observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
        )
        with torch.no_grad():
            self.inside(torch.linspace(-2, 2, 32).view(2, 16))

    def inside(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.quantize(hidden)
        return made


@odd()
class Prototypes(Net):
    """Sets its weight to rows of length 1 before it reads it, as SwAV does."""

    def begin(self) -> None:
        self.middle = nn.Linear(16, 16)

    def inside(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.middle.weight.copy_(nn.functional.normalize(self.middle.weight, dim=1))
        return self.middle(nn.functional.normalize(hidden, dim=-1))


class Perceptual(nn.Module):
    """A loss that compares what a network that nobody trains sees, of random weights."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.sees = nn.Sequential(
                nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
            )
        self.eval().requires_grad_(False)

    def forward(self, outputs: Tensor, batch: Any) -> Tensor:
        """Mean square, before the network and behind it."""
        with torch.no_grad():
            wanted = self.sees(batch["y"])
        return square(outputs, batch) + (self.sees(outputs) - wanted).square().mean()


@odd(vectors, Perceptual())
class FeaturesInLoss(Net):
    """Its loss has a network of its own, which is frozen."""
