"""Unusual ops and the shapes they make: views, in-place writes, transforms, skips."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.odd.common import (
    CLASSES,
    LENGTH,
    WIDTH,
    Net,
    odd,
    pictures,
    sequences,
    square,
    vectors,
)


@odd()
class InPlace(Net):
    """Adds, multiplies and writes columns in place."""

    def inside(self, hidden: Tensor) -> Tensor:
        hidden = hidden * 1.0
        hidden += 1
        hidden[:, 0] = 0.5
        hidden.mul_(2).clamp_(-3, 3)
        return hidden


@odd()
class WritesThroughViews(Net):
    """Writes views of a new tensor, and reads it whole."""

    def inside(self, hidden: Tensor) -> Tensor:
        found = hidden.new_zeros(hidden.shape[0], 2, 16)
        found[:, 0] = hidden
        found.view(-1, 32)[:, 16:] += hidden.sin()
        return found.sum(1)


@odd()
class SkipsEverywhere(Net):
    """Every layer gets the outputs of all before it."""

    def begin(self) -> None:
        self.many = nn.ModuleList(nn.Linear(16 * (k + 1), 16) for k in range(5))

    def inside(self, hidden: Tensor) -> Tensor:
        found = [hidden]
        for layer in self.many:
            found.append(layer(torch.cat(found, -1)).tanh())
        return found[-1]


@odd()
class Fourier(Net):
    """A transform there and back."""

    def begin(self) -> None:
        self.filter = nn.Parameter(torch.randn(9))

    def inside(self, hidden: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(hidden) * self.filter, n=16)


@odd()
class LinearAlgebra(Net):
    """Solves, inverts, takes a determinant."""

    def inside(self, hidden: Tensor) -> Tensor:
        square = hidden.unflatten(-1, (4, 4)) + 4 * torch.eye(4, device=hidden.device)
        found = torch.linalg.solve(square, square.transpose(-1, -2))
        return found.flatten(-2) + torch.logdet(square @ square.mT)[:, None]


@odd(sequences)
class Einsums(Net):
    """Attention by einsum, with a relative bias."""

    def begin(self) -> None:
        self.bias = nn.Parameter(torch.zeros(4, 2 * LENGTH - 1))

    def inside(self, hidden: Tensor) -> Tensor:
        heads = hidden.unflatten(-1, (4, 4))
        at = torch.arange(hidden.shape[1], device=hidden.device)
        bias = self.bias[:, at[:, None] - at + LENGTH - 1]
        weights = (torch.einsum("bqhd,bkhd->bhqk", heads, heads) + bias).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, heads).flatten(-2)


@odd(sequences)
class Rotary(Net):
    """Rotary positions from a buffer that is not saved."""

    def begin(self) -> None:
        self.register_buffer("speed", 10.0 ** -torch.arange(0, 8), persistent=False)

    def inside(self, hidden: Tensor) -> Tensor:
        angles = torch.arange(hidden.shape[1], device=hidden.device)[:, None] * self.speed
        one, two = hidden.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)


@odd(sequences)
class StateSpace(Net):
    """A linear recurrence as a cumulative product and sum."""

    def begin(self) -> None:
        self.decay = nn.Parameter(torch.zeros(16))

    def inside(self, hidden: Tensor) -> Tensor:
        log = (
            F.logsigmoid(self.decay) * torch.arange(hidden.shape[1], device=hidden.device)[:, None]
        )
        return (hidden * (-log).exp()).cumsum(1) * log.exp()


@odd(sequences)
class OverTime(Net):
    """Convolutions over time, causal by padding."""

    def begin(self) -> None:
        self.conv = nn.Conv1d(16, 16, 3, groups=4)

    def inside(self, hidden: Tensor) -> Tensor:
        return self.conv(F.pad(hidden.mT, (2, 0))).mT.contiguous()


@odd(sequences)
class Windows(Net):
    """Windows by unfold and back by fold."""

    def inside(self, hidden: Tensor) -> Tensor:
        return hidden.unfold(1, 2, 2).flip(-1).permute(0, 1, 3, 2).reshape(hidden.shape)


@odd(pictures)
class Unet(nn.Module):
    """Skips across, bilinear upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, padding=1)
        self.c, self.d = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, CLASSES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[b, CLASSES]"""
        one = self.a(x).relu()
        two = self.c(self.b(one).relu()).relu()
        up = F.interpolate(two, scale_factor=2, mode="bilinear")
        return self.d(torch.cat([one, up], 1)).mean((2, 3))


@odd(pictures)
class Warped(nn.Module):
    """A spatial transformer: a grid from an affine map."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Sequential(nn.Flatten(), nn.Linear(768, 6))
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, CLASSES, 3))

    def forward(self, x: Tensor) -> Tensor:
        """[b, CLASSES]"""
        theta = self.where(x).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, device=x.device)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.conv(F.grid_sample(x, grid, align_corners=False)).mean((2, 3))


@odd(pictures)
class ChannelsLast(nn.Module):
    """Convolutions in channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.b, self.norm = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """[b, CLASSES]"""
        x = x.contiguous(memory_format=torch.channels_last)
        return self.out(self.norm(self.b(self.a(x).relu_())).mean((2, 3)))


@odd(pictures)
class Shuffled(nn.Module):
    """Channel shuffle, squeeze and excitation, adaptive pools."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 1)
        self.b = nn.Conv2d(8, 8, 3, groups=4, padding=1)
        self.gate = nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8), nn.Sigmoid())
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """[b, CLASSES]"""
        hidden = F.channel_shuffle(self.a(x), 2)
        hidden = self.b(hidden) * self.gate(hidden.mean((2, 3)))[..., None, None]
        return self.out(F.adaptive_max_pool2d(hidden, 1).flatten(1))


@odd(pictures)
class Volume(nn.Module):
    """Three dims of space."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, CLASSES, (3, 4, 4), (1, 4, 4))
        self.norm = nn.BatchNorm3d(4)

    def forward(self, x: Tensor) -> Tensor:
        """[b, CLASSES]"""
        return self.b(self.norm(self.a(x[:, None])).relu()).mean((2, 3, 4))


@odd(pictures)
class AttentionOfOneHead(nn.Module):
    """As autoencoders of diffusion models have it between convolutions: no degree divides it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 4, 4), nn.Conv2d(16, CLASSES, 3)
        self.norm, self.qkv, self.out = nn.GroupNorm(4, 16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """[b, CLASSES]"""
        x = self.a(x)
        q, k, v = self.qkv(self.norm(x).flatten(2).mT)[:, None].chunk(3, -1)
        made = nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]
        return self.b((x + self.out(made).mT.unflatten(2, x.shape[2:])).relu()).mean((2, 3))


@odd(pictures)
class Mixer(nn.Module):
    """Patches, mixed over space and over channels in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.space = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.across = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """[b, CLASSES]"""
        hidden = self.patch(x).flatten(2).transpose(1, 2)
        for space, across in zip(self.space, self.across, strict=True):
            hidden = hidden + space(hidden.transpose(1, 2)).transpose(1, 2)
            hidden = hidden + F.gelu(across(hidden))
        return self.out(hidden.mean(1))


@odd(sequences)
class ChunksByStrides(nn.Module):
    """Attention within chunks that overlap, made by strides in memory, as Longformer makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.v, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[b, LENGTH, WIDTH]: heads of 4, chunks of 4 words that begin at every second one."""
        q, k = self._chunks(self.q(x.transpose(0, 1))), self._chunks(self.k(x.transpose(0, 1)))
        weights = (q @ k.mT).softmax(-1)[..., 0].mean(1).view(-1, 2, 1, 4)
        v = self.v(x).view(-1, LENGTH, 2, 4).transpose(1, 2) * weights
        return self.out(v.transpose(1, 2).reshape(x.shape))

    def _chunks(self, turned: Tensor) -> Tensor:
        """[LENGTH, b, 2 WIDTH] -> [2 b, 2, 4, 4]"""
        heads = turned.view(LENGTH, -1, 2, 8).permute(1, 2, 0, 3)
        gated = (heads[..., :4] * heads[..., 4:].sigmoid()).reshape(-1, LENGTH, 4)
        far = gated.stride(1)
        return gated.as_strided((len(gated), 2, 4, 4), (4, 2 * far, far, 1))


@odd(vectors, lambda outputs, batch: square(outputs[0], batch) + 0.01 * outputs[1])
class OffDiagonal(Net):
    """Barlow Twins' loss: a matrix of correlations, all but whose diagonal is squared in place."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.first(self.up(x)), self.second(self.up(x.flip(-1)))
        found = one.T @ two
        size = found.shape[0]
        off = found.flatten()[:-1].view(size - 1, size + 1)[:, 1:].flatten()
        return self.down(one.tanh()), off.pow_(2).sum() + (found.diagonal() - 1).square().sum()


class _LongFilter(nn.Module):
    """A filter as long as the row, made of positions by a small network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.made = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, width))
        self.bias = nn.Parameter(torch.ones(width))

    def kernel(self, length: int) -> Tensor:
        """[width, length]."""
        at = torch.linspace(0, 1, length).unsqueeze(-1)
        kernel: Tensor = self.made(torch.cat([at, at.sin(), at.cos()], -1)).T
        return kernel

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        length = x.shape[-1]
        seen = torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        return torch.fft.irfft(seen, n=2 * length)[..., :length] + x * self.bias.unsqueeze(-1)


@odd(sequences)
class LongConvolutions(Net):
    """As Hyena: a method of a filter makes its kernel, and the filter is called with that."""

    def begin(self) -> None:
        self.filters = nn.ModuleList(_LongFilter(16) for _ in range(3))

    def inside(self, hidden: Tensor) -> Tensor:
        for one in self.filters:
            assert isinstance(one, _LongFilter)
            mixed = one(hidden.transpose(1, 2), one.kernel(hidden.shape[1]))
            hidden = hidden + mixed.transpose(1, 2).tanh()
        return hidden


@odd(sequences)
class NeighboursOfAll(Net):
    """Means over neighbours in graphs that are one large graph, whose degrees `bincount` counts."""

    def begin(self) -> None:
        self.middle = nn.Linear(16, 16)

    def inside(self, hidden: Tensor) -> Tensor:
        rows, nodes, _ = hidden.shape
        own = torch.arange(rows * nodes, device=hidden.device)
        first = own // nodes * nodes
        near = torch.cat([first + (own - first) * step % nodes for step in (2, 3)])
        degrees = torch.bincount(near, minlength=rows * nodes).clamp(min=1)
        flat = self.middle(hidden).flatten(0, 1)
        summed = torch.zeros_like(flat).index_add(0, near, flat.repeat(2, 1))
        return (summed / degrees[:, None]).view_as(hidden)
