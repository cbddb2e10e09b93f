"""Trace a model on a batch: its `Graph`, and the values that Python read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from autopipe.batch.arguments import forward_arguments
from autopipe.batch.tree import flatten
from autopipe.eager import refused_effects
from autopipe.frontend.loss import Loss, check_arguments
from autopipe.frontend.training_mode import put_into
from autopipe.planfile.parts import InputSpec, Read
from autopipe.planfile.regions import Region
from autopipe.tracing.capture.export import tensors_of
from autopipe.tracing.capture.low_precision import (
    SixteenBits,
)
from autopipe.tracing.capture.program import Program
from autopipe.tracing.traced import Trace
from autopipe.tracing.tracer import Tracer
from autopipe.util.progress import Say


def trace(
    model: nn.Module,
    batch: object,
    specs: Sequence[InputSpec],
    loss: Loss | None = None,
    *,
    training: bool = True,
    reads: Sequence[Read] | None = None,
    regions: Sequence[Region] = (),
    real: Callable[[], nn.Module] | None = None,
    symbolic: bool = True,
    outputs: bool = False,
    kept: SixteenBits | None = None,
    original: nn.Module | None = None,
    others: Callable[[], object] | None = None,
    lines_may_fix_rows: bool = False,
    say: Say | None = None,
) -> Trace:
    """Trace a model with fake parameters (`construct.fake_copy`, `.build_fake`).

    Args:
        batch: an example batch of at least two rows.
        specs: the batch's description (`batch.description.describe`).
        loss: `loss(outputs, batch)`; None takes a scalar output or an output's `.loss`.
        training: trace in training mode; False traces evaluation.
        reads: the recorded reads of an earlier trace, to be replayed; None: record them now.
        regions: those of an earlier trace, in training; without any, they are looked for.
        real: builds the model with its weights, if a read depends on one.
        symbolic: False fixes the rows to the example's. Otherwise a dim that is `s` in the specs is
            a symbol as well (`tracing.symbolic_sequence`).
        outputs: whether the graph also returns the model's own outputs.
        kept: how the model is trained in 16 bits (`low_precision`); None: as it is built.
        original: the module that `model` is a copy of, if one was given: the loss may hold it.
        others: makes a batch of as many other rows; a call in which Python reads other values of
            these rows becomes a region.
        lines_may_fix_rows: whether lines that fix the number of rows may become a region.
        say: receives one line of progress text at a time.

    Raises:
        CaptureError: the model cannot be captured; the message names the user's line.
        ModelError: the inputs do not fit the model, or the loss takes other arguments.
    """
    leaves = flatten(batch)
    forward_arguments(model, batch, loss)
    check_arguments(loss)
    put_into(model, training)
    if training:
        for module in (model, *([] if original is None else [original])):
            refused_effects.check_model(module)
    tracing = Tracer(
        program=Program(
            model,
            batch,
            loss,
            specs,
            outputs=outputs,
            kept=kept,
            training=training,
            twins=() if original is None else (original,),
            lines_may_fix_rows=lines_may_fix_rows,
        ),
        leaves=leaves,
        specs=tuple(specs),
        regions=tuple(regions),
        symbolic=symbolic,
        say=say or (lambda line: None),
        others=others and (lambda: tensors_of(flatten(others()), specs)),
        # A buffer may be read in 16 bits instead: making weights takes far longer than a look.
        dtypes_first=kept is not None,
    )
    return tracing.traced(real, reads)
