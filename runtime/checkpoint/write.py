"""Writes a rank's tensors into one file, block by block, and then the file's manifest.

    tensors as the rank holds them --> rank-3.safetensors, on the disk --> rank-3.json, on the disk

A manifest reaches the disk after the tensors that it lists. At most one block of a tensor is copied
at a time: a tensor in host memory is read where it lies.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor, uint8

from autopipe.errors import CheckpointError
from autopipe.runtime.checkpoint.folder import manifest_name, tensors_name
from autopipe.runtime.checkpoint.layout import Piece, Shape
from autopipe.runtime.checkpoint.manifest import FORMAT, Chunk, Chunks, Manifest, text
from autopipe.runtime.parameters.export import DTYPES, FileTensor, header
from autopipe.util import atomic_file, dtypes

BLOCK = 4 << 20
"""The approximate number of bytes that one checksum covers, and that are copied at a time."""


@dataclass(frozen=True)
class Written:
    """A tensor to be written; `manifest.Chunk` says what the fields are.

    `tensor` has at least one dim.
    """

    name: str
    state: str
    kind: str
    tensor: Tensor
    shape: Shape
    pieces: tuple[Piece, ...]
    aliases: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.name}/{self.state}" if self.state else self.name


@dataclass(frozen=True)
class RankFile:
    """A rank's part of a checkpoint; `training` is the state of its run, as JSON data."""

    step: int
    rank: int
    ranks: int
    tensors: tuple[Written, ...]
    training: Mapping[str, Any]


def write(folder: Path, content: RankFile, stop: Callable[[], bool] = lambda: False) -> None:
    """Write a rank's tensors and its manifest into `folder`, and flush both to the disk.

    Args:
        stop: called before each block; returns whether the run has ended meanwhile.

    Raises:
        CheckpointError: safetensors has no such dtype, or `stop` has returned True.
        OSError: a file cannot be written.
    """
    order = sorted(content.tensors, key=lambda written: -written.tensor.dtype.itemsize)
    for written in order:
        if written.tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{written.key!r} is {written.tensor.dtype}, which a safetensors file cannot hold"
            )
    begins = header([FileTensor((w.key,), tuple(w.tensor.shape), w.tensor.dtype) for w in order])
    chunks, at = [], 0
    with open(folder / tensors_name(content.rank), "xb") as file:
        file.write(begins)
        for written in order:
            rows = _rows_a_block(written.tensor)
            sums = _blocks(file, written.tensor, rows, stop)
            chunks.append(_chunk(written, at, rows, sums))
            at += chunks[-1].bytes
        file.flush()
        os.fsync(file.fileno())
    total = len(begins) + at
    found = Chunks(
        FORMAT, content.step, content.rank, content.ranks,
        len(begins), zlib.crc32(begins), total, tuple(chunks),
    )  # fmt: skip
    atomic_file.write(text(Manifest(found, content.training)), folder / manifest_name(content.rank))


def _blocks(file: BinaryIO, tensor: Tensor, rows: int, stop: Callable[[], bool]) -> tuple[int, ...]:
    """Write a tensor's rows; returns a checksum for each block of `rows` rows."""
    sums = []
    for begin in range(0, tensor.shape[0], rows):
        if stop():
            raise CheckpointError("the run ended while a checkpoint was being written")
        block = tensor[begin : begin + rows].detach().cpu().contiguous()
        data = block.reshape(-1).view(uint8).numpy().data
        sums.append(zlib.crc32(data))
        file.write(data)
    return tuple(sums)


def _rows_a_block(tensor: Tensor) -> int:
    row = tensor.shape[1:].numel() * tensor.dtype.itemsize
    return max(1, BLOCK // max(1, row))


def _chunk(written: Written, at: int, rows: int, sums: Sequence[int]) -> Chunk:
    return Chunk(
        name=written.name,
        state=written.state,
        kind=written.kind,
        dtype=dtypes.name_of(written.tensor.dtype),
        shape=written.shape,
        own=tuple(written.tensor.shape),
        pieces=written.pieces,
        offset=at,
        rows=rows,
        sums=tuple(sums),
        aliases=written.aliases,
    )
