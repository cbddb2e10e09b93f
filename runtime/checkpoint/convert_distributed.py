"""A checkpoint's model  ->  a folder that torch.distributed.checkpoint loads.

    folder/.metadata           each tensor under all of its names, by the rows of its chunks
           __0_0.distcp ...    a chunk each: some rows of a tensor

`torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id=folder)` reads it, under any
layout, FSDP2's or tensor parallelism's. At most one chunk is in memory. Each chunk has its own file
since torch's writer holds all chunks of a file in memory until the file is complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from autopipe.errors import CheckpointError
from autopipe.runtime.checkpoint.convert import model_of, written_dtype
from autopipe.runtime.checkpoint.stored import Stored
from autopipe.runtime.checkpoint.whole import WholeTensor, some_rows
from autopipe.util import atomic_file
from autopipe.util.progress import Done, phase

CHUNK = 64 << 20
"""The approximate number of bytes of a chunk."""


def to_distributed(
    stored: Stored, folder: Path, dtype: torch.dtype | None = None, most: int = CHUNK
) -> None:
    """Write the model as a folder of torch.distributed.checkpoint.

    Args:
        dtype: of the floating-point tensors; None: as they are.
        most: bytes of a chunk, if a row is not larger by itself.

    Raises:
        AutopipeError: the folder has something in it, the checkpoint is damaged, or a file cannot
            be written.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise CheckpointError(
            f"{folder} is not empty, it has {min(path.name for path in folder.iterdir())}: a "
            "checkpoint of torch.distributed.checkpoint needs a folder of its own",
            hint="name a new folder after -o",
        )
    model = {name: tensor for tensor in model_of(stored) for name in (tensor.name, *tensor.aliases)}
    items = [item for name in model for item in _items(name, model[name], dtype, most)]
    with phase("converting", of=len(items)) as done, atomic_file.folder(folder) as made:
        writer = FileSystemWriter(made, single_file_per_rank=False, per_thread_copy_ahead=0)
        try:
            with warnings.catch_warnings():
                # This process is alone, on purpose.
                warnings.filterwarnings("ignore", message=".*single process")
                planner = _Chunks(stored, model, items, done)
                save({}, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:  # torch's own wrapping, a BaseException
            raise next(iter(error.failures.values()))[0] from error


def _items(
    name: str, tensor: WholeTensor, dtype: torch.dtype | None, most: int
) -> Iterator[WriteItem]:
    """The chunks of a tensor, of at most `most` bytes or one row each; without dims it is one."""
    properties = TensorProperties(written_dtype(tensor, dtype))
    size = torch.Size(tensor.shape)
    rows = size[0] if size else 1
    step = max(1, most // max(1, prod(size[1:]) * properties.dtype.itemsize))
    for number, first in enumerate(range(0, max(1, rows), step)):
        begins = torch.Size([first, *[0] * (len(size) - 1)] if size else [])
        shape = torch.Size([min(step, rows - first), *size[1:]] if size else [])
        data = TensorWriteData(ChunkStorageMetadata(begins, shape), properties, size)
        index = MetadataIndex(name, begins, number)
        yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)


class _Chunks(SavePlanner):
    """Tells torch which chunks there are, and gives it the rows of each when it writes them."""

    def __init__(
        self,
        stored: Stored,
        model: Mapping[str, WholeTensor],
        items: Sequence[WriteItem],
        done: Done,
    ) -> None:
        self._stored, self._model, self._items, self._done = stored, model, items, done

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the constructor has all that is written."""

    def create_local_plan(self) -> SavePlan:
        """The plan of all chunks: there are no other processes."""
        return SavePlan([*self._items])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans unchanged, and the folder's metadata."""
        held: dict[str, TensorStorageMetadata] = {}
        for item in self._items:
            data = _data(item)
            name = item.index.fqn
            held.setdefault(name, TensorStorageMetadata(data.properties, data.size, []))
            held[name].chunks.append(data.chunk)
        return all_plans, Metadata({**held})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The rows of a chunk."""
        self._done()
        tensor, data = self._model[write_item.index.fqn], _data(write_item)
        begins, shape = data.chunk.offsets, data.chunk.sizes
        first, count = (begins[0], shape[0]) if shape else (0, 1)
        rows = some_rows(self._stored, tensor, first, count)
        return rows.to(data.properties.dtype).reshape(shape)


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data
