"""Some rows of a batch, of its leaves or of the whole tree; and rows of the described length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from autopipe.batch import row_length
from autopipe.batch.description import count_rows
from autopipe.batch.tree import Leaf, flatten, from_specs, rebuild
from autopipe.planfile.parts import InputSpec
from autopipe.util import dims


def slice_rows(
    specs: Sequence[InputSpec], leaves: Mapping[str, Leaf], start: int, stop: int
) -> dict[str, Leaf]:
    """Rows [start, stop) of every tensor with a batch dim; other leaves unchanged."""
    cut: dict[str, Leaf] = {}
    for spec in specs:
        leaf = leaves[spec.path]
        if isinstance(leaf, Tensor) and spec.batch_dim is not None:
            factor = dims.size_at(spec.shape[spec.batch_dim], 1)
            leaf = leaf.narrow(spec.batch_dim, start * factor, (stop - start) * factor)
        cut[spec.path] = leaf
    return cut


def pick_rows(
    specs: Sequence[InputSpec], leaves: Mapping[str, Leaf], numbers: Sequence[int]
) -> dict[str, Leaf]:
    """Rows of these numbers, in this order; other leaves unchanged."""
    rows, picked = [slice_rows(specs, leaves, n, n + 1) for n in numbers], dict(leaves)
    for spec in specs:
        if spec.batch_dim is not None:
            parts = [cast(Tensor, row[spec.path]) for row in rows]
            picked[spec.path] = torch.cat(parts, spec.batch_dim)
    return picked


def two_rows(example: Any, specs: Sequence[InputSpec]) -> Any:
    """The first two rows of a batch, for tracing: export treats a dim of size 1 as a constant."""
    return some_rows(example, specs, 2)


def some_rows(example: Any, specs: Sequence[InputSpec], wanted: int) -> Any:
    """The first `wanted` rows of a batch; a batch with fewer rows is repeated."""
    leaves = flatten(example)
    rows = count_rows(specs, leaves)
    times = -(-wanted // rows)
    if times > 1:
        leaves = {
            spec.path: torch.cat([leaf] * times, spec.batch_dim)
            if isinstance(leaf := leaves[spec.path], Tensor) and spec.batch_dim is not None
            else leaf
            for spec in specs
        }
    return rebuild(example, slice_rows(specs, leaves, 0, wanted))


def example_to_trace(inputs: Any, specs: Sequence[InputSpec], rows: int) -> Any:
    """A batch of `rows` rows, as long as described, to trace a planned model with.

    Args:
        inputs: a batch, or a function that makes one of given rows; None: one of arbitrary values.
    """
    example = inputs(rows) if callable(inputs) else inputs
    if example is None:
        return from_specs(specs, rows)
    return _longest(some_rows(example, specs, rows), specs)


def _longest(example: Any, specs: Sequence[InputSpec]) -> Any:
    """The batch if its rows are as long as described; else as many rows of that length, with
    arbitrary values, in the same containers."""
    leaves = flatten(example)
    if row_length.length_in(specs, leaves) == row_length.length_of(specs):
        return example
    return rebuild(example, flatten(from_specs(specs, count_rows(specs, leaves))))
