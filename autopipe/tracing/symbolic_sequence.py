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

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sympy
from torch import Tensor, nn

from autopipe.batch import row_length
from autopipe.batch.tree import flatten, rebuild
from autopipe.errors import CaptureError, ModelError
from autopipe.frontend.loss import Loss
from autopipe.ir.graph import SEQUENCE, Arg, Graph, TensorSpec, at_sequence
from autopipe.planfile.parts import InputSpec, Read
from autopipe.tracing.capture.low_precision import SixteenBits
from autopipe.tracing.source import Source, bare, trace_source
from autopipe.tracing.trace import trace
from autopipe.tracing.traced import Trace


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


def with_tokens(graph: Graph, length: int) -> Graph:
    """A graph with s = `length` tokens, so that the rows are its only symbol."""

    def inside(arg: Arg) -> Any:
        if isinstance(arg, tuple) and not hasattr(arg, "_fields"):
            return tuple(inside(item) for item in arg)
        return at_sequence(arg, length) if isinstance(arg, sympy.Basic) else arg

    def spec(known: TensorSpec) -> TensorSpec:
        return TensorSpec(tuple(at_sequence(dim, length) for dim in known.shape), known.dtype)

    return replace(
        graph,
        inputs={path: spec(known) for path, known in graph.inputs.items()},
        nodes=tuple(
            replace(
                node,
                args=inside(node.args),
                kwargs={key: inside(arg) for key, arg in node.kwargs.items()},
                outputs=tuple(known and spec(known) for known in node.outputs),
            )
            for node in graph.nodes
        ),
    )


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
    length, why = (
        row_length.length_of(specs),
        "no tensor of whole numbers has one dim besides its rows",
    )
    run = partial(trace_source, model, loss=loss, kept=kept)
    if length is not None:
        found = _symbolic(run, example, specs, length)
        if found is not None:
            return found
        why = f"what the model does at {length} tokens depends on their number"
    return Lengths(run(example, specs), None, why)


_Run = Callable[[Any, Sequence[InputSpec]], Trace]
"""Traces a model on an example that is described so."""


def _symbolic(run: _Run, example: Any, specs: Sequence[InputSpec], length: int) -> Lengths | None:
    """The trace for all lengths up to the example's, or to one token less; None: there is none."""
    long = row_length.lengthened(specs, length)
    # At full length `table[:s]` may be the whole table, a different program.
    for longest in (length, length - 1):
        with suppress(CaptureError):  # of the model itself: then a trace of one length tells
            return Lengths(run(shorter(example, specs, longest), long), longest)
    return None


class AtLengths:
    """A model's traces at lengths below the one that it is planned for.

    One trace serves all of them if the sequence can be a symbol; otherwise each has its own.

    Args:
        specs: the description of a batch of the longest rows.
        example: a batch of two such rows.
        reads: the recorded reads of the plan's trace, to be replayed; None: record them each time.
    """

    def __init__(
        self,
        model: Source,
        specs: Sequence[InputSpec],
        example: Any,
        loss: Loss | None,
        kept: SixteenBits | None = None,
        reads: Sequence[Read] | None = None,
    ) -> None:
        self._model, self._specs, self._example = model, specs, example
        self._loss, self._kept, self._reads = loss, kept, reads
        self._tried = False
        self._symbolic: Lengths | None = None

    def at(self, length: int, rows: Any) -> Trace:
        """The trace for rows of `length` tokens, on `rows`: a batch of two of them.

        Raises:
            ModelError: the model cannot be run at this length; names the user's line.
        """
        specs = row_length.at_length(self._specs, length)
        longest = row_length.length_of(self._specs)
        assert longest is not None, "a batch without a sequence has one length"
        if not self._tried:
            self._tried = True
            self._symbolic = _symbolic(self._run, self._example, self._specs, longest)
        found = self._symbolic
        if found is not None and found.longest is not None and 2 <= length <= found.longest:
            graph = with_tokens(found.trace.graph, length)
            return replace(found.trace, graph=graph, inputs=tuple(specs))
        try:
            return self._run(rows, specs)
        except ModelError as error:
            raise type(error)(
                f"rows of {length} tokens, where the plan is for {longest}: {error.message}",
                hint=error.hint,
            ) from error

    def _run(self, example: Any, specs: Sequence[InputSpec]) -> Trace:
        if self._reads is None:
            return trace_source(self._model, example, specs, self._loss, kept=self._kept)
        original = self._model if isinstance(self._model, nn.Module) else None
        model = bare(self._model)
        reads, kept = self._reads, self._kept
        return trace(model, example, specs, self._loss, reads=reads, kept=kept, original=original)


def shorter(example: Any, specs: Sequence[InputSpec], length: int) -> Any:
    """A batch of this description with only the first `length` tokens of every row."""
    leaves, longest = flatten(example), row_length.length_of(specs)
    assert longest is not None, "a batch without a sequence has one length"
    for spec in row_length.lengthened(specs, longest):
        leaf = leaves[spec.path]
        for number, entry in enumerate(spec.shape):
            if isinstance(leaf, Tensor) and entry == str(SEQUENCE):
                leaf = leaf.narrow(number, 0, length)
        leaves[spec.path] = leaf
    return rebuild(example, leaves)
