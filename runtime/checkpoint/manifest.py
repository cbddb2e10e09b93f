"""The manifest of a rank: the places of tensors in the rank's file, and the state of its run.

    rank-3.json            {"sum": "8c1f02aa", "chunks": {...}, "training": {...}}
    rank-3.safetensors     header, then the chunks, one after the other

A chunk is a tensor as the rank holds it: the model's name of it, the places of its elements in the
whole tensor, and a checksum for every few rows, so that a reader of a few rows reads only these.
Checksums are zlib's CRC-32; `sum` is the checksum of the two other entries, as `text` writes them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from autopipe.errors import DamagedError, PlanError
from autopipe.runtime.checkpoint.layout import Piece, Shape
from autopipe.runtime.parameters.export import DTYPES
from autopipe.util import codec, dtypes

FORMAT = 1
"""The version of the format; raised when a field changes its meaning."""

MOST = 1 << 28
"""Bytes of a manifest at most; a larger file is refused."""

NAMES = {dtypes.name_of(dtype): dtype for dtype in DTYPES}
"""The dtypes that a chunk may have, by their names in a manifest."""

FLOATS = {name: dtype for name, dtype in NAMES.items() if dtype.is_floating_point}
"""The floating-point ones among `NAMES`: the dtypes that weights may have."""


@dataclass(frozen=True)
class Chunk:
    """A tensor in a rank's file.

    Attributes:
        name: the name of the parameter or buffer in the model.
        state: "" for the tensor itself; the key of an optimizer's state for it; `replica 1 of 2`
            for its values in a replica other than the first.
        kind: "parameter", "buffer", "beside" (`layout.BESIDE`) or "replica" (`layout.REPLICA`); an
            optimizer's state is "like" the parameter, one "number", or "whole" (of another shape).
        dtype: torch's name of the dtype, without `torch.`.
        shape: the shape of the whole tensor.
        own: the shape of the part in the file.
        pieces: the places of the part's elements in the whole tensor.
        offset: the position of its first byte in the file, counted from the end of the header.
        rows: the number of rows that each checksum covers; the last one may cover fewer.
        sums: the checksums.
        aliases: the other names of a tied parameter.
    """

    name: str
    state: str
    kind: str
    dtype: str
    shape: Shape
    own: Shape
    pieces: tuple[Piece, ...]
    offset: int
    rows: int
    sums: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The chunk's name in the file: `wte.weight`, `wte.weight/exp_avg`."""
        return f"{self.name}/{self.state}" if self.state else self.name

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the part."""
        return prod(self.own[1:]) * NAMES[self.dtype].itemsize

    @property
    def bytes(self) -> int:
        """Bytes of all its rows."""
        return self.own[0] * self.row_bytes


@dataclass(frozen=True)
class Chunks:
    """The contents of a rank's file.

    Attributes:
        format: the version of the manifest's format.
        step: how many steps the run has made.
        rank, ranks: the rank whose file it is, and the number of ranks.
        header: bytes before the first chunk.
        header_sum: the checksum of these bytes.
        bytes: the length of the whole file.
    """

    format: int
    step: int
    rank: int
    ranks: int
    header: int
    header_sum: int
    bytes: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """A rank's manifest; `training` is the state of its run, as JSON data."""

    chunks: Chunks
    training: Mapping[str, Any]


def text(manifest: Manifest) -> str:
    """The text of the manifest's file.

    Raises:
        TypeError: `training` is no JSON data.
    """
    body = {
        "chunks": codec.to_json(manifest.chunks, "chunks"),
        "training": dict(manifest.training),
    }
    return json.dumps({"sum": _sum(body), **body}) + "\n"


def read(data: bytes, place: str) -> Manifest:
    """The manifest in a file's bytes, checked; `place` names the file in errors.

    Raises:
        DamagedError: the bytes are not what `text` wrote, or contradict themselves.
    """
    try:
        body = json.loads(data)
        checksum = body.pop("sum")
        if checksum != _sum(body):
            raise DamagedError(f"{place} was changed after it was written: its checksum differs")
        chunks = codec.from_json(Chunks, body["chunks"], "chunks")
        training = body["training"]
        if not isinstance(training, dict):
            raise DamagedError(f"{place}: training: expected an object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{place} is no manifest of a checkpoint, or not a whole one") from error
    except PlanError as error:
        raise DamagedError(f"{place}: {error.message}") from error
    if chunks.format != FORMAT:
        raise DamagedError(
            f"{place}: expected a checkpoint of format {FORMAT}, found format {chunks.format}"
        )
    if chunks.ranks < 1 or not 0 <= chunks.header <= chunks.bytes:
        raise DamagedError(
            f"{place}: a header of {chunks.header} bytes in a file of {chunks.bytes}, "
            f"of {chunks.ranks} ranks"
        )
    for chunk in chunks.chunks:
        if wrong := _wrong(chunk, chunks):
            raise DamagedError(f"{place}: {chunk.key!r}: {wrong}")
    return Manifest(chunks, training)


def _sum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(canonical.encode()):08x}"


def _wrong(chunk: Chunk, among: Chunks) -> str | None:
    """The first impossible entry of a chunk, in words; nothing is read or allocated before this."""
    if chunk.dtype not in NAMES:
        return f"no dtype is called {chunk.dtype!r}"
    if not chunk.own or min(chunk.own) < 0 or min(chunk.shape, default=0) < 0:
        return f"no tensor has the shape {list(chunk.shape)}, or of it {list(chunk.own)}"
    if chunk.rows < 1 or len(chunk.sums) != -(-chunk.own[0] // chunk.rows):
        return f"{len(chunk.sums)} checksums, each of {chunk.rows} of {chunk.own[0]} rows"
    if chunk.offset < 0 or among.header + chunk.offset + chunk.bytes > among.bytes:
        return f"its bytes would end after the file's {among.bytes}"
    whole = chunk.shape or (1,)
    for piece in chunk.pieces:
        if not len(piece.whole) == len(piece.own) == len(piece.shape) == len(whole):
            return "a piece has other dims than its tensor"
        for begins, of in ((piece.whole, whole), (piece.own, chunk.own)):
            ends = [b + length for b, length in zip(begins, piece.shape, strict=True)]
            if min(begins) < 0 or min(piece.shape) < 0:
                return "a piece begins before its tensor"
            if len(of) != len(ends) or any(e > size for e, size in zip(ends, of, strict=True)):
                return "a piece ends after its tensor"
    return None
