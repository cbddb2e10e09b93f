"""Find a batch's sequence dims, and trace the model with their length as a symbol.

    inputs(2)    tokens int64[2, 4096], labels int64[2, 4096]
    described    tokens int64[b, s],    labels int64[b, s]

A batch does not declare its sequence dim, so it is guessed: the dim beside the rows in the first
two-dim integer tensor; and every dim of the same size in integer and bool tensors, or right after
the rows of a floating-point tensor. A wrong guess does no harm: torch.export proves that the trace
is valid for all lengths up to the example's (or to one token less, if tables are as long as that),
or refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from autopipe.errors import CaptureError
from autopipe.frontend import batch as batches
from autopipe.frontend.loss import Loss
from autopipe.ir.graph import SEQUENCE
from autopipe.planfile.parts import InputSpec
from autopipe.tracing.low_precision import SixteenBits
from autopipe.tracing.source import Source, trace_source
from autopipe.tracing.trace import Trace

SHORTEST = 8
"""The fewest tokens of a row for a symbolic sequence; shorter ones are not worth halving."""


@dataclass(frozen=True)
class Lengths:
    """A trace, and the lengths of sequence for which it is valid.

    Attributes:
        trace: its shapes are expressions in b (rows), and in s (tokens) if that is a symbol.
        longest: the longest valid sequence, in tokens; None: the sequence is no symbol.
        why: why the sequence is no symbol, as text for the user; empty if it is one.
    """

    trace: Trace
    longest: int | None
    why: str = ""


def length_of(specs: Sequence[InputSpec]) -> int | None:
    """Tokens of a row in a batch; None if no dim looks like a sequence."""
    for spec in specs:
        if spec.batch_dim is not None and len(spec.shape) == 2 and spec.low is not None:
            size = spec.shape[1 - spec.batch_dim]
            if isinstance(size, int) and size >= SHORTEST:
                return size
    return None


def lengthened(specs: Sequence[InputSpec], length: int) -> list[InputSpec]:
    """The description of a batch with `s` in place of its sequence dims of size `length`."""

    def entry(spec: InputSpec, number: int, size: int | str) -> int | str:
        behind = spec.batch_dim is not None and number == spec.batch_dim + 1
        whole = spec.dtype == "bool" or spec.low is not None
        return str(SEQUENCE) if size == length and (whole or behind) else size

    return [
        replace(spec, shape=tuple(entry(spec, n, size) for n, size in enumerate(spec.shape)))
        for spec in specs
    ]


def trace_lengths(
    model: Source,
    example: Any,
    specs: Sequence[InputSpec],
    loss: Loss | None,
    kept: SixteenBits | None = None,
) -> Lengths:
    """Trace a model with symbolic rows, and with a symbolic sequence if it has one.

    Args and raises: as `source.trace_source`.
    """
    length, why = length_of(specs), "no tensor of whole numbers has one dim besides its rows"
    if length is not None:
        long = lengthened(specs, length)
        # At full length `table[:s]` may be the whole table, which is another program.
        for longest in (length, length - 1):
            with suppress(CaptureError):  # of the model itself: then it comes again below
                batch = _cut(example, long, longest)
                return Lengths(trace_source(model, batch, long, loss, kept=kept), longest)
        why = f"what the model does at {length} tokens depends on their number"
    return Lengths(trace_source(model, example, specs, loss, kept=kept), None, why)


def _cut(example: Any, specs: Sequence[InputSpec], length: int) -> Any:
    """The batch with only the first `length` tokens of every row."""
    leaves = batches.flatten(example)
    for spec in specs:
        leaf = leaves[spec.path]
        for number, entry in enumerate(spec.shape):
            if isinstance(leaf, Tensor) and entry == str(SEQUENCE):
                leaf = leaf.narrow(number, 0, length)
        leaves[spec.path] = leaf
    return batches.rebuild(example, leaves)
