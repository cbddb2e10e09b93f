"""Reads a checkpoint: the pieces of a tensor, from whichever ranks' files they lie in.

    wanted: rows 2..5 of 8         rank-0: rows 0..3      rank-1: rows 4..7
                                            --|2 3|              |4 5|--

Only the blocks that have wanted rows are read, and each is compared with its checksum. Files are
read, never mapped, so that a file that is cut short meanwhile raises an error and does not kill the
process. `manifest.read` has checked every number that this module takes from a manifest.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from autopipe.errors import CheckpointError, DamagedError
from autopipe.runtime.checkpoint import manifest
from autopipe.runtime.checkpoint.folder import manifest_name, step_of, tensors_name
from autopipe.runtime.checkpoint.layout import REPLICA, OwnTensor, Piece, Shape
from autopipe.runtime.checkpoint.manifest import NAMES, Chunk, Manifest

Key = tuple[str, str]
"""A tensor in a checkpoint: `manifest.Chunk`'s `name` and `state`."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint on the disk, whose manifests have all been read."""

    folder: Path
    manifests: tuple[Manifest, ...]

    @classmethod
    def open(cls, folder: Path) -> Stored:
        """Read the manifests, and check that all files exist and have their lengths.

        Raises:
            DamagedError: a file is missing, damaged or of another checkpoint; its name is given.
            CheckpointError: the folder is no checkpoint.
        """
        named = step_of(folder)
        if not (folder / manifest_name(0)).exists():
            if named is not None and folder.is_dir():
                raise DamagedError(f"{folder} has lost {manifest_name(0)}, or never had it")
            raise CheckpointError(
                f"{folder} is no checkpoint: it has no {manifest_name(0)}",
                hint="a checkpoint is a folder step-NNNNNNNN, as --checkpoints writes it",
            )
        first = _manifest(folder, 0)
        ranks = first.chunks.ranks
        every = (first, *(_manifest(folder, rank) for rank in range(1, ranks)))
        for rank, one in enumerate(every):
            if (one.chunks.rank, one.chunks.ranks) != (rank, ranks):
                raise DamagedError(
                    f"{folder / manifest_name(rank)}: expected rank {rank} of {ranks}, found rank "
                    f"{one.chunks.rank} of {one.chunks.ranks}"
                )
            if one.chunks.step != first.chunks.step:
                raise DamagedError(
                    f"{folder / manifest_name(rank)} is of step {one.chunks.step}, and rank 0's of "
                    f"step {first.chunks.step}"
                )
            path = folder / tensors_name(rank)
            with _opened(path) as file:
                size = os.fstat(file).st_size
            if size != one.chunks.bytes:
                raise DamagedError(f"{path} has {size} bytes, expected {one.chunks.bytes}")
        if named not in (None, first.chunks.step):
            raise DamagedError(
                f"{folder} is of step {named} by its name, and of step {first.chunks.step} by "
                f"{manifest_name(0)} in it"
            )
        return cls(folder, every)

    @property
    def step(self) -> int:
        """How many steps its run had made."""
        return self.manifests[0].chunks.step

    @cached_property
    def chunks(self) -> Mapping[Key, Sequence[tuple[int, Chunk]]]:
        """The chunks of each tensor, each with the rank whose file it is in."""
        every: dict[Key, list[tuple[int, Chunk]]] = {}
        for rank, one in enumerate(self.manifests):
            for chunk in one.chunks.chunks:
                every.setdefault((chunk.name, chunk.state), []).append((rank, chunk))
        return every

    @cached_property
    def states(self) -> Mapping[str, Sequence[str]]:
        """The keys of the optimizer's state for each parameter that has some."""
        every: dict[str, list[str]] = {}
        for (name, state), found in self.chunks.items():
            if state and found[0][1].kind != REPLICA:
                every.setdefault(name, []).append(state)
        return every

    def check_fits(self, own: OwnTensor, state: str = "") -> None:
        """Refuse a tensor that the manifests do not have, or have in another shape.

        Args:
            own, state: as `fill` has them.

        Raises:
            CheckpointError: names the tensor, and both shapes.
        """
        chunks = self.chunks.get((own.name, state), ())
        label = own.name if not state else f"{own.name}/{state}"
        if not chunks and own.pieces:
            raise CheckpointError(f"{self.folder} has no {label!r}")
        for _, chunk in chunks:
            if chunk.shape != own.shape:
                raise CheckpointError(
                    f"{self.folder}: {label!r} has the shape {list(chunk.shape)}, in the model "
                    f"{list(own.shape)}"
                )

    def fill(self, own: OwnTensor, state: str = "", into: Tensor | None = None) -> None:
        """Read a rank's elements of a tensor, or of an optimizer's state for it.

        Args:
            own: the rank's tensor.
            state: the key of the optimizer's state; "": the tensor itself.
            into: a tensor of the shape of `own.tensor`, to read into; None: `own.tensor`.

        Raises:
            DamagedError: a block has another checksum, or elements are missing.
            CheckpointError: the tensor is not in the checkpoint, or has another shape there.
        """
        target = own.tensor if into is None else into
        self.check_fits(own, state)
        missing = sum(prod(piece.shape) for piece in own.pieces)
        for rank, chunk in self.chunks.get((own.name, state), ()):
            boxes = [
                box
                for stored_piece in chunk.pieces
                for own_piece in own.pieces
                if (box := _common(stored_piece, own_piece))
            ]
            missing -= sum(prod(box.shape) for box in boxes)
            for first, block in self._blocks(rank, chunk, boxes):
                for box in boxes:
                    _copy(target, block, first, box)
        if missing:
            label = own.name if not state else f"{own.name}/{state}"
            raise DamagedError(f"{self.folder}: {label!r} lacks {missing} elements")

    def number(self, name: str, state: str) -> Tensor:
        """A state that is one number, as a tensor without dims."""
        rank, chunk = self.chunks[name, state][0]
        everything = [Piece((0,) * len(chunk.own), (0,) * len(chunk.own), chunk.own)]
        for _, block in self._blocks(rank, chunk, everything):
            if block.numel() == 1:
                return block.reshape(()).clone()
        raise DamagedError(f"{self.folder}: {name}/{state} is not one number")

    def check(self) -> None:
        """Read all files, and compare them with their checksums.

        Raises:
            DamagedError: the sentence names the file and the tensor.
        """
        for rank, one in enumerate(self.manifests):
            path = self.folder / tensors_name(rank)
            with _opened(path) as file:
                begins = _read(file, path, 0, one.chunks.header)
            if zlib.crc32(begins) != one.chunks.header_sum:
                raise DamagedError(f"{path} was changed after it was written: its header differs")
            for chunk in one.chunks.chunks:
                for _ in self._blocks(rank, chunk, None):
                    pass

    def _blocks(
        self, rank: int, chunk: Chunk, boxes: Sequence[Piece] | None
    ) -> Iterator[tuple[int, Tensor]]:
        """The blocks of a chunk with rows of these boxes (None: all): first row and the rows."""
        path, header = self.folder / tensors_name(rank), self.manifests[rank].chunks.header
        if boxes is not None and not boxes:
            return
        with _opened(path) as file:
            for number, expected in enumerate(chunk.sums):
                first = number * chunk.rows
                last = min(first + chunk.rows, chunk.own[0])
                if boxes is not None and not any(
                    box.whole[0] < last and box.whole[0] + box.shape[0] > first for box in boxes
                ):
                    continue
                at = header + chunk.offset + first * chunk.row_bytes
                data = _read(file, path, at, (last - first) * chunk.row_bytes)
                if zlib.crc32(data) != expected:
                    raise DamagedError(
                        f"{path} was changed after it was written: {chunk.key!r}, rows {first} to "
                        f"{last}, has another checksum"
                    )
                if data:
                    rows = torch.frombuffer(data, dtype=NAMES[chunk.dtype])
                    yield first, rows.view(last - first, *chunk.own[1:])


def _common(theirs: Piece, mine: Piece) -> Piece | None:
    """The elements that two pieces share; its `whole` is where these begin in their own tensor."""
    ends = [b + n for b, n in zip(theirs.whole, theirs.shape, strict=True)]
    own_ends = [b + n for b, n in zip(mine.whole, mine.shape, strict=True)]
    begins = [max(a, b) for a, b in zip(theirs.whole, mine.whole, strict=True)]
    shape = [min(a, b) - c for a, b, c in zip(ends, own_ends, begins, strict=True)]
    if min(shape) <= 0:
        return None
    return Piece(
        _within(begins, theirs.whole, theirs.own),
        _within(begins, mine.whole, mine.own),
        tuple(shape),
    )


def _within(begins: Sequence[int], whole: Shape, own: Shape) -> Shape:
    return tuple(b - w + o for b, w, o in zip(begins, whole, own, strict=True))


def _copy(target: Tensor, block: Tensor, first: int, box: Piece) -> None:
    """Copy the elements of a box that lie in a block, of rows from `first` on, into the target."""
    begin = max(box.whole[0], first)
    end = min(box.whole[0] + box.shape[0], first + block.shape[0])
    if begin >= end:
        return
    source = block.narrow(0, begin - first, end - begin)
    place = target.narrow(0, box.own[0] + begin - box.whole[0], end - begin)
    for dim in range(1, block.ndim):
        source = source.narrow(dim, box.whole[dim], box.shape[dim])
        place = place.narrow(dim, box.own[dim], box.shape[dim])
    place.copy_(source)


def _manifest(folder: Path, rank: int) -> Manifest:
    path = folder / manifest_name(rank)
    with _opened(path) as file:
        size = os.fstat(file).st_size
        if size > manifest.MOST:
            raise DamagedError(f"{path} has {size} bytes, which no manifest has")
        return manifest.read(bytes(_read(file, path, 0, size)), str(path))


class _opened:
    """Within, a file is open for reading, as its descriptor.

    Raises:
        DamagedError: it is no regular file. Others are refused, as to read a pipe may never end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> int:
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise DamagedError(f"{self._path} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise DamagedError(f"{self._path} is no file")
        return self._file

    def __exit__(self, *error: object) -> None:
        os.close(self._file)


def _read(file: int, path: Path, at: int, size: int) -> bytearray:
    """Read `size` bytes at the position `at` of a file, into new memory for tensors to view."""
    data, had = bytearray(size), 0
    while had < size:
        try:
            more = os.preadv(file, [memoryview(data)[had:]], at + had)
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
        if not more:
            raise DamagedError(f"{path} ends after {at + had} bytes, expected {at + size} at least")
        had += more
    return data
