"""The inputs of an ONNX file, and the names that Python has for a file's."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from autopipe.errors import ModelError
from autopipe.onnx_files.elementwise import DTYPES

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class FileInput:
    """An input of a file: its name in Python, its dtype, its dims; text is a dim that may vary."""

    name: str
    dtype: torch.dtype
    dims: tuple[int | str, ...]


def inputs_of(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """The inputs of a run; old files list their initializers among them."""
    held = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in held]


def entries_of(values: Sequence[onnx.ValueInfoProto], file: str) -> tuple[FileInput, ...]:
    """The inputs of the file, each with a name that an argument may have: `0` is `input_0`.

    Raises:
        ModelError: an entry is no tensor, or has a dtype that is not read.
    """
    found: dict[str, FileInput] = {}
    for value in values:
        tensor = value.type.tensor_type
        if not value.type.HasField("tensor_type") or tensor.elem_type not in DTYPES:
            raise ModelError(
                f"{file}: the input {value.name!r} is no tensor of a dtype that is read"
            )
        dims = tuple(
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"{value.name}_{n}"
            for n, dim in enumerate(tensor.shape.dim)
        )
        name = "_".join(python_names(value.name))
        name = f"input_{name}" if name[0].isdigit() else name
        while name in found:  # of two names that Python cannot tell apart
            name += "_"
        found[name] = FileInput(name, DTYPES[tensor.elem_type], dims)
    return tuple(found.values())


def python_names(name: str) -> Sequence[str]:
    """The parts of a name between its dots, each as an attribute that a module may have."""
    found = [re.sub(r"\W", "_", part) for part in name.split(".") if part] or ["value"]
    taken = dir(nn.Module())
    return [f"{part}_" if keyword.iskeyword(part) or part in taken else part for part in found]
