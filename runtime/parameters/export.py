"""Writes the whole model to one safetensors file, gathering it from the ranks tensor by tensor.

    rank 0    stage 0, part 0   --+
    rank 1    stage 0, part 1   --+--whole--> rank 0 --> header, wte.weight, h.0..., lm_head.weight
    rank 2    stage 1, part 0   --+
    ...

Every tensor is made whole by the ranks that have parts of it, and the first of these sends it to
rank 0, which writes it and lets it go: no rank holds more than one tensor beside its own. A tied
tensor stands in the file under each of its names, as `load_state_dict(strict=True)` asks for it.

A file begins with the bytes of its header in 8 bytes, then has the header, JSON, then the tensors
(https://github.com/huggingface/safetensors, "Format"). Wide dtypes come first: all are aligned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.errors import AutopipeError
from autopipe.planfile.parts import Place
from autopipe.util import atomic_file

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.bool: "BOOL",
}
"""What the format calls them."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the model: its names, the first one the graph's, and what it is when whole."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor, once."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def export(
    path: Path,
    kept: Sequence[FileTensor],
    whole: Callable[[str], Tensor],
    place: Place,
    world: dist.ProcessGroup | None,
) -> None:
    """Write the model; every rank calls it.

    Args:
        kept: this rank's tensors of the model.
        whole: makes a tensor whole, by its first name, together with all ranks that have a part.
        world: all ranks of the run; None: this one is alone.

    Raises:
        AutopipeError: the format lacks a dtype, or the file cannot be written.
    """
    own_tensors = place.rank, tuple(kept)
    gathered: list[Any] = [own_tensors]
    if world is not None:
        gathered = [None] * dist.get_world_size(world)
        dist.all_gather_object(gathered, own_tensors, group=world)
    order, holders = _order(gathered)
    own_names = {tensor.names[0] for tensor in kept}
    if place.rank == 0:
        with atomic_file.writing(path) as file:
            file.write(header(order))
            for tensor in order:
                rank = holders[tensor.names[0]]
                data = whole(tensor.names[0]) if tensor.names[0] in own_names else None
                if rank != 0:
                    data = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    _receive(data, rank, world)
                assert data is not None
                raw = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                for _ in tensor.names:
                    file.write(raw.data)
        return
    for tensor in order:
        if tensor.names[0] not in own_names:
            continue
        data = whole(tensor.names[0])  # of a tied one, rows may be with other stages' ranks
        if holders[tensor.names[0]] == place.rank:
            _send(data.detach().cpu().contiguous(), world)


def _order(
    gathered: Sequence[tuple[int, tuple[FileTensor, ...]]],
) -> tuple[list[FileTensor], dict[str, int]]:
    """All tensors as the file has them, and of each the rank that gives it."""
    tensors: dict[str, FileTensor] = {}
    holders: dict[str, int] = {}
    for rank, kept in sorted(gathered, key=lambda one: one[0]):
        for tensor in kept:
            if tensor.dtype not in DTYPES:
                raise AutopipeError(
                    f"{tensor.names[0]!r} is {tensor.dtype}, which a safetensors file cannot hold"
                )
            tensors.setdefault(tensor.names[0], tensor)
            holders.setdefault(tensor.names[0], rank)
    return sorted(tensors.values(), key=lambda tensor: -tensor.dtype.itemsize), holders


def header(order: Sequence[FileTensor]) -> bytes:
    """The bytes that a file of these tensors, in this order, begins with."""
    entries: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in order:
        for name in tensor.names:
            entries[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": (at, at + tensor.bytes),
            }
            at += tensor.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _send(tensor: Tensor, world: dist.ProcessGroup | None) -> None:
    if tensor.numel():
        dist.send(_raw(tensor), 0, group=world)


def _receive(tensor: Tensor, rank: int, world: dist.ProcessGroup | None) -> None:
    if tensor.numel():
        dist.recv(_raw(tensor), rank, group=world)


def _raw(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, which every backend can send."""
    return tensor.reshape(-1).view(torch.uint8)
