"""A checkpoint's model  ->  one safetensors file, or a folder that transformers loads.

    model.safetensors                          all tensors, a tied one under each of its names
    folder/model-00001-of-00003.safetensors    no file larger than 5 GB, with an index of them,
           config.json, tokenizer.json, ...    copied from the folder that the model came from

Rows are read and written some at a time: no tensor is ever whole in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from autopipe.errors import CheckpointError
from autopipe.runtime.checkpoint.layout import BESIDE
from autopipe.runtime.checkpoint.stored import Stored
from autopipe.runtime.checkpoint.whole import WholeTensor, tensors, windows
from autopipe.runtime.parameters.export import FileTensor, header
from autopipe.util import atomic_file, dtypes
from autopipe.util.progress import Done, phase

MOST = 5 * 10**9
"""Bytes of a weight file in a folder at most, the default of transformers."""

_COPIED = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files beside the weights in a folder of transformers, which are copied."""

INDEX = "model.safetensors.index.json"

_DTYPE = ("dtype", "torch_dtype")
"""The key of the dtype in a config.json, in transformers 5 and in earlier versions."""

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Files from which transformers takes weights; it takes the first that it finds."""


def to_file(stored: Stored, path: Path, dtype: torch.dtype | None = None) -> None:
    """Write the model as one safetensors file, each tensor under all of its names.

    Args:
        dtype: of the floating-point tensors; None: as they are.

    Raises:
        AutopipeError: the checkpoint is damaged, or the file cannot be written.
    """
    model = model_of(stored)
    with phase("converting", of=len(model)) as done, atomic_file.writing(path) as file:
        _write(file, stored, model, dtype, done)


def to_folder(
    stored: Stored,
    folder: Path,
    config: Path,
    dtype: torch.dtype | None = None,
    most: int = MOST,
) -> list[Path]:
    """Write the model as a folder that `transformers.AutoModel.from_pretrained` loads.

    Args:
        config: the folder that the model came from, with its config.json.
        most: bytes of tensors in a file, if a tensor is not larger by itself.

    Returns:
        The files of tensors.

    Raises:
        AutopipeError: the checkpoint is damaged, there is no config.json, the folder has other
            weights, or a file cannot be written.
    """
    if not (config / "config.json").is_file():
        raise CheckpointError(
            f"{config} has no config.json, from which transformers learns what the model is",
            hint="--config is the folder that the model came from",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"the folder {folder} cannot be made: {error.strerror}",
            hint="give another name after -o",
        ) from error
    parts = _parts(model_of(stored), dtype, most)
    paths, weights = [folder / name for name in _names(len(parts))], dict[str, str]()
    _make_room(folder, {path.name for path in paths})
    with phase("converting", of=sum(map(len, parts))) as done:
        for path, part in zip(paths, parts, strict=True):
            with atomic_file.writing(path) as file:
                _write(file, stored, part, dtype, done)
            weights |= {n: path.name for tensor in part for n in (tensor.name, *tensor.aliases)}
    if len(parts) > 1:
        total = sum(_bytes(tensor, dtype) for part in parts for tensor in part)
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        atomic_file.write(json.dumps(index, indent=2), folder / INDEX)
    for pattern in _COPIED:
        for path in config.glob(pattern):
            if path.name != INDEX and path.resolve() != (folder / path.name).resolve():
                shutil.copyfile(path, folder / path.name)
    if dtype is not None:
        _say_dtype(folder / "config.json", dtype)
    return paths


def _say_dtype(path: Path, dtype: torch.dtype) -> None:
    """Write the dtype of the weights into a config.json: transformers casts weights to that dtype.

    Raises:
        CheckpointError: the file is no JSON object.
    """
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: this is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected an object, found {type(config).__name__}")
    for key in [key for key in _DTYPE if key in config] or _DTYPE[:1]:
        config[key] = dtypes.name_of(dtype)
    atomic_file.write(json.dumps(config, indent=2) + "\n", path)


def _names(parts: int) -> list[str]:
    if parts == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{parts:05}.safetensors" for number in range(1, parts + 1)]


def _make_room(folder: Path, names: Collection[str]) -> None:
    """Refuse a folder with weights in files that are not overwritten; remove the old index.

    The new index is written last: without one transformers does not load half of the old weights
    and half of the new ones.
    """
    for other in sorted(path.name for kind in _WEIGHTS for path in folder.glob(kind)):
        if other not in names:
            raise CheckpointError(
                f"{folder} has other weights, {other}: transformers might load them instead",
                hint="name a folder without weights after -o",
            )
    (folder / INDEX).unlink(missing_ok=True)


def strangers(stored: Stored, config: Path) -> list[str]:
    """The names of the model's tensors that the weights in `config` lack; [] if it has no weights.

    transformers ignores such tensors, and initialises the tensors that it misses. A name may lack
    its first part on one side: files of a model without its head have shorter names.
    """
    known: set[str] = set()
    for path in config.glob("*.safetensors"):
        # In a clone without Git LFS the files are pointers, which name no tensors.
        with suppress(SafetensorError), safe_open(str(path), framework="pt") as file:
            known |= {*file.keys()}
    inner = {_inner(name) for name in known}
    return [
        tensor.name
        for tensor in (model_of(stored) if known else ())
        if not any(
            name in known or name in inner or _inner(name) in known
            for name in (tensor.name, *tensor.aliases)
        )
    ]


def _inner(name: str) -> str:
    return name.partition(".")[2]


def model_of(stored: Stored) -> list[WholeTensor]:
    """The tensors of the model, wide dtypes first, so that all are aligned in a file."""
    found = [one for one in tensors(stored) if not one.state and one.kind != BESIDE]
    return sorted(found, key=lambda tensor: -tensor.dtype.itemsize)


def _parts(
    model: Sequence[WholeTensor], dtype: torch.dtype | None, most: int
) -> list[list[WholeTensor]]:
    parts: list[list[WholeTensor]] = [[]]
    filled = 0
    for tensor in model:
        size = _bytes(tensor, dtype) * (1 + len(tensor.aliases))
        if parts[-1] and filled + size > most:
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += size
    return parts


def _bytes(tensor: WholeTensor, dtype: torch.dtype | None) -> int:
    return tensor.bytes // tensor.dtype.itemsize * written_dtype(tensor, dtype).itemsize


def written_dtype(tensor: WholeTensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is written: `dtype` if given and it is a float, else its own."""
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def _write(
    file: BinaryIO,
    stored: Stored,
    model: Sequence[WholeTensor],
    dtype: torch.dtype | None,
    done: Done,
) -> None:
    order = sorted(model, key=lambda tensor: -written_dtype(tensor, dtype).itemsize)
    entries = [FileTensor((t.name, *t.aliases), t.shape, written_dtype(t, dtype)) for t in order]
    file.write(header(entries))
    for tensor in order:
        for _ in (tensor.name, *tensor.aliases):
            for rows in windows(stored, tensor):
                data = rows.to(written_dtype(tensor, dtype)).reshape(-1).view(torch.uint8)
                file.write(data.numpy().data)
        done()
