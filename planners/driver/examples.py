"""Micro-batches of the user's own rows, with which planning runs a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopipe.frontend import batch
from autopipe.planfile.parts import InputSpec
from autopipe.tracing.trace import Trace

ROWS = 2
"""Of a micro-batch that a model is traced with."""


def examples(inputs: Any, example: Any, specs: Sequence[InputSpec]) -> Callable[[int], Any]:
    """Makes a batch of so many rows: `inputs` itself, or else rows of the example."""

    def some(rows: int) -> Any:
        return inputs(rows) if callable(inputs) else batch.some_rows(example, specs, rows)

    return some


def second(inputs: Any, example: Any, specs: Sequence[InputSpec], rows: int = ROWS) -> Any:
    """The rows behind the first so many, as many again; the first ones if there are no others."""
    more = inputs(2 * rows) if callable(inputs) else example
    leaves = batch.flatten(batch.some_rows(more, specs, 2 * rows))
    return batch.rebuild(more, batch.slice_rows(specs, leaves, rows, 2 * rows))


def two(inputs: Any, example: Any, traced: Trace) -> list[Any]:
    """Two micro-batches: the one that was traced, and other rows if there are any."""
    specs, size = traced.inputs, traced.rows or ROWS
    first = example if traced.rows is None else examples(inputs, example, specs)(2 * size)
    return [batch.some_rows(first, specs, size), second(inputs, example, specs, size)]
