"""Whether a model's loss is computed whole or from parts of its vocabulary: the planner's choice.

    whole      logits of all words, in fp32, kept for backward     as the model has it
    in parts   no logits kept, a third more of their products      `rewriting.loss_in_parts`

Parts save memory and cost seconds. So both are searched where the logits are large and memory
matters. Parts are taken if their step is shorter by the estimate, and then also in the plan that
is written; elsewhere the loss stays as it is.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from autopipe.errors import AutopipeError, InfeasibleError
from autopipe.planfile.contents import Plan
from autopipe.planners.driver.choose import best_of_engines, best_plan
from autopipe.planners.driver.request import Job, Traced
from autopipe.rewriting.logits import heads
from autopipe.rewriting.loss_in_parts import in_parts, usual_parts
from autopipe.util.numbers import seconds
from autopipe.util.progress import Say
from autopipe.util.stopwatch import Stopwatch

LARGE = 2**26
"""Bytes in fp32 of the smallest micro-batch's logits, from which on they may be too many."""

SHARE = 1 / 64
"""Of a device's memory that they must take besides: for less it is not worth planning twice."""


def loss_parts_of(asked: int | str | None) -> int | None:
    """The parts of the loss that were asked for, 0 for none; None: the planner chooses.

    Raises:
        AutopipeError: it is neither a number of parts nor one of the words.
    """
    if asked is None or asked == "auto":
        return None
    text = "0" if asked == "off" else str(asked)
    if not text.isdecimal():
        raise AutopipeError(f"loss_parts is {asked!r}", hint="auto, off, or a number of parts")
    return int(text)


def best_loss(job: Job, watch: Stopwatch, say: Say) -> Plan:
    """The best plan, with the loss as asked for, or else whole or in parts, as is faster.

    Raises:
        InfeasibleError: no plan fits.
        AutopipeError: parts were asked for, and the loss has none.
    """
    asked_parts = job.request.loss_parts
    if asked_parts is not None:
        return best_of_engines(replace(job, traced=with_parts(job.traced, asked_parts)), watch).plan
    if not _large(job):
        return best_of_engines(job, watch).plan
    parts = usual_parts(job.traced.graph)
    in_parts_job = replace(job, traced=with_parts(job.traced, parts))
    try:
        chosen = best_of_engines(job, watch)
    except InfeasibleError as refusal:
        with suppress(InfeasibleError):
            parted = best_of_engines(in_parts_job, watch).plan
            say(f"loss: in {parts} parts of the vocabulary; nothing fits with it whole")
            return parted
        raise refusal
    whole = chosen.plan
    if not _memory_matters(whole):
        return whole
    with suppress(InfeasibleError):
        parted = best_plan(in_parts_job.on_engine(compiled=whole.compiled), watch, chosen).plan
        steps = parted.prediction.step_seconds, whole.prediction.step_seconds
        if steps[0] < steps[1]:
            step, whole_step = map(seconds, steps)
            say(f"loss: in {parts} parts of the vocabulary: a step of {step}; {whole_step} whole")
            return parted
    return whole


def with_parts(traced: Traced, parts: int) -> Traced:
    """The traced model with its loss in `parts` parts; 0: whole.

    Raises:
        AutopipeError: its loss is no cross-entropy of a product, or something else reads the
            logits.
    """
    if not parts:
        return traced
    if not heads(traced.graph):
        raise AutopipeError(
            f"loss_parts={parts} was asked for, and the model computes no cross-entropy of a "
            "product whose logits nothing else reads",
            hint="leave loss_parts out; or give F.cross_entropy what a linear layer has made, "
            "without weights of classes or label smoothing",
        )
    return replace(traced.rewritten(in_parts(traced.graph, parts)), loss_parts=parts)


def _large(job: Job) -> bool:
    """Whether the logits of the smallest micro-batch are large."""
    traced, limits = job.traced, job.constraints.memory or ()
    room = min([*limits, *(device.memory for device in job.cluster.row)])
    every = (head.logits_bytes(traced.least.rows) for head in heads(traced.graph))
    return max(every, default=0) >= max(LARGE, SHARE * room)


def _memory_matters(plan: Plan) -> bool:
    """Whether the plan recomputes, offloads or shards, or another mesh does not fit."""
    note = plan.planner
    others = [other for other in (note.next_best, *note.others) if other is not None]
    misfits = any(other.slower is None for other in others)
    less = any(stage.recompute or stage.offload for stage in plan.stages)
    return misfits or plan.zero > 0 or less
