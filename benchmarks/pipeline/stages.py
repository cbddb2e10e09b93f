"""The stages both sides run: sleeping ones, which cost time and no processor, and linear layers.

    sleep     y = nap(x * scale) + nap(shift)         forward, gradient of the input, gradient of
                                                      the weight: a third of the time each
    matmul    y = gelu(linear(... gelu(linear(x))))   the same ratios, done by a core

Sleeping stands for a device whose kernels do not compete with the host for its cores. The nap of
the weight's gradient is a node of its own in autograd's graph, as in a linear layer's: whoever
splits backward into input and weight finds both, torch too. `x * scale` makes the first stage nap
as long as the others, though nobody wants its input's gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BOUNDARY_BYTES = 256 * 1024
"""Of the tensor between two sleeping stages."""

LAYERS = 4
"""Linear layers of a rank; of several stages on one rank, each has its share."""


def _sleep(x: Tensor, forward: float, backward: float) -> Tensor:
    if forward > 0:
        time.sleep(forward)
    return x.clone()


nap = torch.library.custom_op(
    "pipeline_benchmark::nap",
    _sleep,
    mutates_args=(),
    schema="(Tensor x, float forward, float backward) -> Tensor",
)
"""A copy of x, `forward` seconds later; its gradient comes `backward` seconds later."""

nap.register_fake(lambda x, forward, backward: torch.empty_like(x))


def _setup(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
    ctx.seconds = inputs[2]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return nap(gradient, ctx.seconds, 0.0), None, None


nap.register_autograd(_backward, setup_context=_setup)


class Sleep(nn.Module):
    """Takes `seconds` for a micro-batch, a third for each of forward and the two gradients."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.third = seconds / 3

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = nap(x * self.scale, self.third, self.third)
        return y + nap(self.shift, 0.0, self.third)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """What the last stage is seeded with, on both sides; it costs next to nothing."""
    return torch.dot(output.flatten(), target.flatten()) / output.numel()


@dataclass(frozen=True)
class Model:
    """A model cut into stages, and the batch of one step.

    Attributes:
        stages: all of them; each rank builds all, and runs its own.
        batch, target: all micro-batches, one after the other; only the first stage's rank reads
            the one and the last stage's rank the other.
    """

    stages: tuple[nn.Module, ...]
    batch: Tensor
    target: Tensor
    micro_batches: int

    @property
    def rows(self) -> int:
        """Of one micro-batch."""
        return len(self.batch) // self.micro_batches

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of all stages, in their order."""
        for stage in self.stages:
            yield from stage.parameters()

    def zero_grad(self) -> None:
        """Forget the gradients of all stages."""
        for parameter in self.parameters():
            parameter.grad = None


@dataclass(frozen=True)
class Side:
    """A way to run a training step: `make()` gives the step, with the buffers it keeps."""

    model: Model
    make: Callable[[], Callable[[], None]]


def build(
    compute: str, ranks: int, chunks: int, micro_batches: int, seconds: float, rate: float
) -> Model:
    """The same model on every rank.

    Args:
        compute: "sleep" or "matmul".
        chunks: stages of each rank.
        seconds: of one micro-batch, forward and backward, on one rank.
        rate: operations a second that "matmul" is sized by; what it then takes is measured.

    Raises:
        ValueError: the layers of a rank do not divide into `chunks`.
    """
    torch.manual_seed(0)
    stages: list[nn.Module]
    if compute == "sleep":
        width, rows = 1024, BOUNDARY_BYTES // 4096
        stages = [Sleep(width, seconds / chunks) for _ in range(ranks * chunks)]
    else:
        if LAYERS % chunks:
            raise ValueError(f"{LAYERS} layers do not divide into {chunks} stages")
        # Forward and both gradients of a layer: 6 * rows * width^2 operations; rows = width.
        width = rows = max(16, round((seconds * rate / (6 * LAYERS)) ** (1 / 3) / 16) * 16)
        stages = [_layers(width, LAYERS // chunks) for _ in range(ranks * chunks)]
    batch, target = torch.randn(2, micro_batches * rows, width)
    return Model(tuple(stages), batch, target, micro_batches)


def _layers(width: int, number: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(number):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers)
