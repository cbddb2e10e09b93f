"""Assembles a checkpoint's whole tensors in one process, a few rows at a time or all at once.

rank-0.safetensors --+
rank-1.safetensors --+--> rows 0..1023 of wte.weight, rows 1024..2047, ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from autopipe.errors import DamagedError
from autopipe.runtime.checkpoint.layout import OwnTensor, Piece, Shape
from autopipe.runtime.checkpoint.manifest import NAMES
from autopipe.runtime.checkpoint.optimizer import NUMBER
from autopipe.runtime.checkpoint.stored import Stored

WINDOW = 16 << 20
"""Bytes, about, of the rows that are in memory at a time."""


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of a checkpoint; `manifest.Chunk` says what the fields are."""

    name: str
    state: str
    kind: str
    dtype: torch.dtype
    shape: Shape
    aliases: tuple[str, ...]

    @property
    def key(self) -> str:
        """`wte.weight`, or of an optimizer's state `wte.weight/exp_avg`."""
        return f"{self.name}/{self.state}" if self.state else self.name

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


def tensors(stored: Stored) -> list[WholeTensor]:
    """All of a checkpoint's tensors: the model's, then the optimizer's states.

    Raises:
        DamagedError: the chunks of one contradict each other.
    """
    found = []
    for (name, state), chunks in sorted(stored.chunks.items(), key=lambda one: one[0][1] != ""):
        first = chunks[0][1]
        if len({(chunk.dtype, chunk.shape, chunk.kind) for _, chunk in chunks}) > 1:
            raise DamagedError(f"{stored.folder}: {first.key!r} has parts of several tensors")
        dtype = NAMES[first.dtype]
        found.append(WholeTensor(name, state, first.kind, dtype, first.shape, first.aliases))
    return found


def windows(stored: Stored, tensor: WholeTensor) -> Iterator[Tensor]:
    """The rows of a tensor, some at a time; one without dims is one row.

    Raises:
        DamagedError: they are not what was written.
    """
    if tensor.kind == NUMBER:
        yield stored.number(tensor.name, tensor.state).reshape(1)
        return
    shape = tensor.shape or (1,)
    row = prod(shape[1:]) * tensor.dtype.itemsize
    step = max(1, WINDOW // max(1, row))
    for first in range(0, shape[0], step):
        yield some_rows(stored, tensor, first, min(step, shape[0] - first))


def whole(stored: Stored, tensor: WholeTensor) -> Tensor:
    """A whole tensor; it must not be a state that is one number (`Stored.number`).

    Raises:
        DamagedError: it is not what was written.
    """
    rows = tensor.shape[0] if tensor.shape else 1
    return some_rows(stored, tensor, 0, rows).reshape(tensor.shape)


def some_rows(stored: Stored, tensor: WholeTensor, first: int, count: int) -> Tensor:
    """Rows of a tensor from the first on; one without dims is one row.

    Raises:
        DamagedError: they are not what was written.
    """
    shape = (count, *tensor.shape[1:])
    rows = torch.empty(shape, dtype=tensor.dtype, device="cpu")
    piece = Piece((first, *(0,) * (len(shape) - 1)), (0,) * len(shape), shape)
    pieces = (piece,) if prod(shape) else ()
    asked = OwnTensor(tensor.name, (), tensor.kind, rows, tensor.shape, pieces, writes=False)
    stored.fill(asked, tensor.state)
    return rows
