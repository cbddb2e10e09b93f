"""An ONNX file as a model file: model(), inputs(batch_size), and a loss where it has none."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.onnx_files.entries import FileInput
from autopipe.onnx_files.module import OnnxModule, from_onnx

WORDS = 2
"""A bound on an example's integers, which have to be below the rows of any table."""

LENGTH = 16
"""Of a dim that varies, beside the rows."""


def as_module(source: str) -> SimpleNamespace:
    """The module that a model file would define.

    A file has no loss. Where its output is no single number the mean of the squares of its outputs
    stands for one: it gives every trained parameter a gradient, and means nothing else.

    Raises:
        ModelError: as `from_onnx`; or the first dim of an input is no number of rows that varies.
    """
    path = Path(source)
    built = from_onnx(path)
    assert isinstance(built, OnnxModule)
    entries, single = built.entries, _single(built)
    del built
    for entry in entries:
        if not entry.dims or isinstance(entry.dims[0], int):
            rows = entry.dims[0] if entry.dims else "no"
            raise ModelError(
                f"{source}: the input {entry.name!r} is of {rows} rows, and a step has others",
                hint="export it with a number of rows that varies: torch.onnx.export(..., "
                'dynamic_shapes={"x": {0: torch.export.Dim("rows")}})',
            )

    def model() -> nn.Module:
        return from_onnx(path)

    def inputs(batch_size: int) -> tuple[Tensor, ...]:
        return tuple(_example(entry, batch_size) for entry in entries)

    found = SimpleNamespace(model=model, inputs=inputs)
    if not single:
        found.loss = mean_of_squares
    return found


def mean_of_squares(outputs: Any, batch: Any) -> Tensor:
    """The mean of the squares of all floating-point outputs, summed over outputs."""
    every: Iterable[Tensor] = outputs.values() if isinstance(outputs, dict) else [outputs]
    means = [x.float().square().mean() for x in every if x.is_floating_point()]
    return torch.stack(means).sum() if len(means) > 1 else means[0]


def _single(model: OnnxModule) -> bool:
    """Whether a run gives one number, which is the loss."""
    if model.dims is not None:
        return model.dims == 0
    with torch.no_grad():
        found = model(*(_example(entry, 2) for entry in model.entries))
    return isinstance(found, Tensor) and found.ndim == 0


def _example(entry: FileInput, rows: int) -> Tensor:
    shape = [rows, *(size if isinstance(size, int) else LENGTH for size in entry.dims[1:])]
    if entry.dtype.is_floating_point:
        return torch.randn(shape, dtype=entry.dtype)
    if entry.dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    return torch.randint(0, WORDS, shape, dtype=entry.dtype)
