"""The plan's cuts in another trace of its model: in evaluation, or for rows of another length."""

from __future__ import annotations

from typing import Any

from autopipe.batch import row_length
from autopipe.batch.cut import some_rows, two_rows
from autopipe.batch.tree import flatten
from autopipe.frontend.loss import Loss
from autopipe.planfile.contents import Plan
from autopipe.planfile.placements import Sharding
from autopipe.runtime.parameters.part import RankPart
from autopipe.stages.bind import Split, rank_trace, split_for_evaluation
from autopipe.tracing.capture.low_precision import kept_by
from autopipe.tracing.source import Source, trace_source
from autopipe.tracing.symbolic_sequence import AtLengths


def split_to_evaluate(
    model: Source,
    loss: Loss | None,
    part: RankPart,
    sharding: Sharding,
    batch: Any,
    outputs: bool,
) -> Split:
    """The model in evaluation mode, traced on rows of `batch` and cut as in training.

    Args:
        outputs: whether its results are also what the model itself gives.

    Raises:
        ModelError: as `trace_planned`.
        PlanError: a stage would need parameters of another one.
    """
    plan = part.plan
    example = some_rows(batch, plan.inputs, plan.traced_rows)
    length = row_length.length_in(plan.inputs, flatten(batch))
    found = trace_source(
        model,
        example,
        plan.inputs if length is None else row_length.at_length(plan.inputs, length),
        loss,
        training=False,
        symbolic=not plan.rows_fixed,
        outputs=outputs,
        kept=kept_by(plan),
        regions=plan.regions,
    )
    return split_for_evaluation(
        rank_trace(found, plan, part.place.tp, sharding, other=True), part.split
    )


def split_at_length(
    traces: AtLengths, part: RankPart, sharding: Sharding, batch: Any, length: int
) -> Split:
    """The model in training with rows of `length` tokens, as `batch` has them, cut as planned.

    Raises:
        ModelError: the model cannot be run at this length; names the user's line.
        PlanError: a stage would need parameters of another one.
    """
    plan = part.plan
    rows = two_rows(batch, plan.inputs)
    local = rank_trace(traces.at(length, rows), plan, part.place.tp, sharding, other=True)
    return split_for_evaluation(local, part.split, f"with rows of {length} tokens")


def traces_at_lengths(model: Source, example: Any, loss: Loss | None, plan: Plan) -> AtLengths:
    """The traces of a planned model for rows that are shorter than those of the example batch,
    which are as long as planned."""
    rows, how = two_rows(example, plan.inputs), kept_by(plan)
    return AtLengths(model, plan.inputs, rows, loss, how, plan.reads)
