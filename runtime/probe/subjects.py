"""Example ops to measure, which run neither at the speed of memory nor at that of a matmul.

Each is a function of one tensor to another of the same shape, so that a chain of it can be made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.cluster.measured import MULTIPLYING, kernel_in

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """An op to measure on tensors of `shape` with more and more rows before it.

    Args:
        make: the function, of one tensor to another of the same shape.
        rows: few rows, whose time is nearly all start, and many.
        operations: those of a row, (forward, backward); None: one for each element.
        dtype: the dtype of the tensors and of the function's parameters.
    """

    make: Callable[[torch.device], Function]
    shape: tuple[int, ...]
    rows: tuple[int, int] = (4, 512)
    operations: tuple[float, float] | None = None
    dtype: torch.dtype = torch.float32

    def function(self, device: torch.device) -> Function:
        """The function, with parameters of the dtype."""
        made = self.make(device)
        return made.to(self.dtype) if isinstance(made, nn.Module) else made


def _plain(function: Function) -> Callable[[torch.device], Function]:
    return lambda device: function


def _linear(device: torch.device) -> Function:
    return nn.Linear(64, 64, device=device)


def _convolution(device: torch.device) -> Function:
    return nn.Conv2d(64, 64, 3, padding=1, device=device)


class _Recurrent(nn.Module):
    """An LSTM of 256, without its states."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.lstm = nn.LSTM(256, 256, batch_first=True, device=device)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lstm(x)[0]
        return found


def _norm(device: torch.device) -> Function:
    return nn.LayerNorm(512, device=device)


def _batch_norm(device: torch.device) -> Function:
    return nn.BatchNorm2d(64, device=device)


def _attention(*, causal: bool = False, dropout: float = 0.0) -> Callable[[torch.device], Function]:
    return lambda device: (
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=causal, dropout_p=dropout)
    )


def _entropy(device: torch.device) -> Function:
    """A cross-entropy of 512 classes; its result is expanded to the logits' shape, at no cost."""

    def run(x: Tensor) -> Tensor:
        targets = torch.zeros(len(x), dtype=torch.int64, device=device)
        return F.cross_entropy(x, targets).expand(x.shape)

    return run


_HEADS, _TOKENS, _HEAD = 4, 128, 64
_SCORES = 4.0 * _HEADS * _TOKENS * _TOKENS * _HEAD
_FILTERS = 2.0 * 16 * 16 * 64 * 64 * 9
_CELLS = 2.0 * 32 * (256 + 256) * 1024
_SEQUENCES = (_HEADS, _TOKENS, _HEAD)

_IN_FP32: dict[str, Subject] = {
    "linear": Subject(_linear, (4, 64), (1, 2), (0.0, 0.0)),
    "conv2d": Subject(_convolution, (64, 16, 16), (1, 8), (_FILTERS, 2 * _FILTERS)),
    "lstm": Subject(_Recurrent, (32, 256), (1, 8), (_CELLS, 2 * _CELLS)),
    "attention": Subject(_attention(), _SEQUENCES, (1, 4), (_SCORES, 2.5 * _SCORES)),
    "causal attention": Subject(
        _attention(causal=True), _SEQUENCES, (1, 4), (_SCORES / 2, 1.25 * _SCORES)
    ),
    "attention with dropout": Subject(
        _attention(dropout=0.1), _SEQUENCES, (1, 4), (_SCORES, 2.5 * _SCORES)
    ),
    "layer_norm": Subject(_norm, (512,)),
    "batch_norm": Subject(_batch_norm, (64, 16, 16), (1, 16)),
    "softmax": Subject(_plain(lambda x: F.softmax(x, -1)), (512,)),
    "log_softmax": Subject(_plain(lambda x: F.log_softmax(x, -1)), (512,)),
    "cross_entropy_loss": Subject(_entropy, (512,)),
    "dropout": Subject(_plain(F.dropout), (512,)),
    "gelu": Subject(_plain(F.gelu), (512,)),
    "silu": Subject(_plain(F.silu), (512,)),
    "tanh": Subject(_plain(torch.tanh), (512,)),
    "sigmoid": Subject(_plain(torch.sigmoid), (512,)),
    "exp": Subject(_plain(lambda x: torch.exp(-x)), (512,)),
    "pow": Subject(_plain(lambda x: torch.pow(x, 3.0)), (512,)),
}

SUBJECTS = _IN_FP32 | {
    kernel_in(name, "bf16"): replace(_IN_FP32[name], dtype=torch.bfloat16) for name in MULTIPLYING
}
"""By the names of `measured.KERNELS`."""
