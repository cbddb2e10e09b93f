"""Reads tensors from a folder of torch.distributed.checkpoint, as FSDP2 and torchtitan write it.

    folder/.metadata          which tensors there are, and in which file each chunk of them lies
           __0_0.distcp ...   the chunks

torch reads `.metadata` by `pickle.load`, which executes whatever the file says. Here it is
unpickled with only those names that torch itself writes: a file that asks for another name is
refused before anything runs. Chunks are read by torch, as tensors only (`weights_only`).
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from autopipe.errors import ModelError

METADATA = ".metadata"

_HERE = "torch.distributed.checkpoint"

_NAMES = {
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
    (f"{_HERE}.filesystem", "_StorageInfo"),
    *(
        (f"{_HERE}.metadata", name)
        for name in (
            "Metadata MetadataIndex StorageMeta TensorStorageMetadata ChunkStorageMetadata "
            "BytesStorageMetadata TensorProperties _MEM_FORMAT_ENCODING"
        ).split()
    ),
}
"""What torch writes into `.metadata`, beside dtypes and the path of the folder."""


class DistributedFolder:
    """The tensors in such a folder, by the names in it.

    Attributes:
        shapes: the shape of each tensor.
        dtypes: the dtype of each.

    Raises:
        ModelError: torch has not written its metadata.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _fence(path):
            self._stored = _tensors(_unpickled(path))
            stored = self._stored.items()
            self.shapes = {name: tuple(held.size) for name, held in stored}
            self.dtypes: dict[str, torch.dtype] = {n: h.properties.dtype for n, h in stored}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Read into these tensors, each of the shape of the one with its name.

        Raises:
            ModelError: elements are missing, or a file is not what torch has written.
        """
        with _fence(self._path), warnings.catch_warnings():
            self._check_whole(tensors)
            # Every rank reads its own by itself, on purpose.
            warnings.filterwarnings("ignore", message=".*single process")
            load(dict(tensors), storage_reader=_Reader(self._path), no_dist=True)

    def _check_whole(self, names: Iterable[str]) -> None:
        """Refuse tensors of which chunks are missing: torch leaves their places as they were."""
        for name in names:
            of = prod(self.shapes[name])
            lacks = of - sum(prod(chunk.sizes) for chunk in self._stored[name].chunks)
            if lacks > 0:
                raise ModelError(
                    f"{self._path}: {name!r} lacks {lacks} of {of} elements",
                    hint="was it saved by all ranks, and copied whole?",
                )


class _Reader(FileSystemReader):
    """torch's reader, with a safe way to unpickle the metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is in the folder."""
        return _unpickled(Path(self.path))


class _Unpickler(pickle.Unpickler):
    """Knows the names that are in metadata, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """The object that a name in a pickle stands for.

        Raises:
            UnpicklingError: torch writes no such name into metadata.
        """
        if module.partition(".")[0] == "pathlib":
            return PurePosixPath  # where the folder was once; of whichever system
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unpickled(path: Path) -> Metadata:
    """The metadata of a folder, of which no file outside the folder is a part."""
    with (path / METADATA).open("rb") as file:
        found = _Unpickler(file).load()
    if not isinstance(found, Metadata):
        raise TypeError(f"it is a {type(found).__name__}")
    for info in found.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"it names the file {info.relative_path!r}")
    return found


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return {
        name: held
        for name, held in metadata.state_dict_metadata.items()
        if isinstance(held, TensorStorageMetadata)
    }


@contextmanager
def _fence(path: Path) -> Iterator[None]:
    """Within, torch reads files that may hold anything.

    Raises:
        ModelError: torch could not read them.
    """
    try:
        yield
    except ModelError:
        raise
    except (Exception, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):  # torch's own wrapping, a BaseException
            cause = next(iter(error.failures.values()))[0]
        said = next(iter(str(cause).splitlines()), "")
        raise ModelError(
            f"{path} is no folder that torch.distributed.checkpoint has written, or not a whole "
            f"one: {type(cause).__name__}: {said}",
            hint="nothing in it was executed; copy the folder again, or load its weights where it "
            "was made and torch.save them",
        ) from error
