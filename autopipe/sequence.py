"""The sequence as a symbol: which dims of a batch it is, and a trace that holds for every length.

    inputs(2)    tokens int64[2, 4096], labels int64[2, 4096]
    described    tokens int64[b, s],    labels int64[b, s]

Nobody's inputs say which dim is the sequence. It is taken to be that of the first tensor of whole
numbers which has one dim besides its rows; and wherever else that size stands, among whole numbers
and flags, or behind the rows of a floating-point tensor. A wrong guess does no harm: torch.export
proves that the trace holds for all lengths up to the example's (or to one token less, where tables
are as long as that), or refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from autopipe import batches
from autopipe.errors import CaptureError
from autopipe.graph import SEQUENCE
from autopipe.losses import Loss
from autopipe.plan import InputSpec
from autopipe.source import Source, trace_source
from autopipe.trace import Trace

SHORTEST = 8
"""Tokens: there is nothing to learn from the halves and quarters of fewer."""


@dataclass(frozen=True)
class Lengths:
    """A trace, and what its sequence is.

    Attributes:
        trace: its shapes are expressions in rows, and in the sequence where that is a symbol.
        longest: the length up to which it holds; None: the sequence is no symbol.
        why: why there is none, for a person; empty where there is one.
    """

    trace: Trace
    longest: int | None
    why: str = ""


def length_of(specs: Sequence[InputSpec]) -> int | None:
    """The length of the sequence in a batch; None where nothing looks like one."""
    for spec in specs:
        if spec.batch_dim is not None and len(spec.shape) == 2 and spec.low is not None:
            size = spec.shape[1 - spec.batch_dim]
            if isinstance(size, int) and size >= SHORTEST:
                return size
    return None


def lengthened(specs: Sequence[InputSpec], length: int) -> list[InputSpec]:
    """The description of a batch with `s` where the sequence is."""

    def entry(spec: InputSpec, number: int, size: int | str) -> int | str:
        behind = spec.batch_dim is not None and number == spec.batch_dim + 1
        whole = spec.dtype == "bool" or spec.low is not None
        return str(SEQUENCE) if size == length and (whole or behind) else size

    return [
        replace(spec, shape=tuple(entry(spec, n, size) for n, size in enumerate(spec.shape)))
        for spec in specs
    ]


def trace_lengths(
    model: Source, example: Any, specs: Sequence[InputSpec], loss: Loss | None
) -> Lengths:
    """Trace a model with the sequence as a symbol if it has one, else with the rows alone.

    Args and raises: as `source.trace_source`.
    """
    length, why = length_of(specs), "no tensor of whole numbers has one dim besides its rows"
    if length is not None:
        long = lengthened(specs, length)
        # At full length `table[:s]` may be the whole table, which is another program.
        for longest in (length, length - 1):
            with suppress(CaptureError):  # of the model itself: then it comes again below
                batch = _cut(example, long, longest)
                return Lengths(trace_source(model, batch, long, loss), longest)
        why = f"what the model does at {length} tokens depends on their number"
    return Lengths(trace_source(model, example, specs, loss), None, why)


def _cut(example: Any, specs: Sequence[InputSpec], length: int) -> Any:
    """The batch with so many tokens in every row."""
    leaves = batches.flatten(example)
    for spec in specs:
        leaf = leaves[spec.path]
        for number, entry in enumerate(spec.shape):
            if isinstance(leaf, Tensor) and entry == str(SEQUENCE):
                leaf = leaf.narrow(number, 0, length)
        leaves[spec.path] = leaf
    return batches.rebuild(example, leaves)
