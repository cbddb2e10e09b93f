"""`parallelize`: this rank's stage of a model, from a plan that all ranks share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from autopipe.errors import PlanError
from autopipe.frontend.loss import Loss
from autopipe.planfile.contents import Plan
from autopipe.runtime.checkpoint import trained
from autopipe.runtime.cut_again import split_at_length, split_to_evaluate, traces_at_lengths
from autopipe.runtime.parameters.hold import hold
from autopipe.runtime.parameters.materialize import Origin
from autopipe.runtime.script.clipping import Clipping, own_parts, parted_dims
from autopipe.runtime.script.stale import check_fresh
from autopipe.runtime.script.unmoved import Unmoved
from autopipe.runtime.start import (
    check_plan,
    connect,
    join,
    own_part,
    own_states,
    trace_planned,
)
from autopipe.runtime.step.pipe import Pipe
from autopipe.runtime.step.prepare import Rank
from autopipe.runtime.step.whole_loss import replicas_of_last_stage
from autopipe.sharding.local_graph import replicated
from autopipe.tracing.source import Source


def parallelize(
    model: Source,
    plan: Plan,
    *,
    inputs: Any = None,
    loss: Loss | None = None,
    weights: str | Path | None = None,
    seed: int = 0,
    offload: bool = False,
    emitted: str | Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Pipe:
    """Make this rank's part of `model` as `plan` says; every rank calls it.

    Args:
        model: the model, whose parameters of this rank's stage are taken as they are, or the
            function that builds it.
        plan: the same on every rank.
        inputs: an example batch to trace with; None: one made from the plan's description.
        loss: as given to `plan`.
        weights: a checkpoint to read this rank's parameters from: a safetensors file, a state_dict
            that torch.save has written, a folder of either, or of torch.distributed.checkpoint; a
            run's checkpoint; or a folder of run's checkpoints, of which the newest is read.
        seed: the seed of the initialisation and of dropout.
        offload: under ZeRO-3, keep parameters, gradients and optimizer state in host memory.
        emitted: a folder that `autopipe emit` has written for this plan: training steps run its
            stages and its programs, as they stand there now.
        say: gets a line of talk at a time, on rank 0.

    Raises:
        LaunchError: other processes were started than the plan is for.
        PlanError: the plan was made for another model (names the first node that differs), or with
            another loss; or `offload` is given for one of another ZeRO stage.
        ModelError: the model cannot be captured; or a parameter's values are missing, or differ
            between ranks, or are not those that another pipe has trained.
        ScheduleError: the programs in `emitted` would wait for each other, or are incomplete.
    """
    if isinstance(model, nn.Module) and weights is None:
        check_fresh(model)
    checked = check_plan(plan, loss, emitted)
    plan, sharding = checked.plan, checked.sharding
    if offload and plan.zero < 3:
        raise PlanError(
            "offload keeps shards of ZeRO-3 in the host's memory, and the plan is of ZeRO-"
            f"{plan.zero}",
            hint="plan with --zero 3; plan --offload auto is of what backward needs",
        )
    joined = join(plan)
    traced = trace_planned(model, inputs, loss, plan)
    part = own_part(checked, joined, traced.trace)
    talk = say if joined.place.rank == 0 else None
    if weights is not None:
        weights = trained.chosen(weights, joined.place.rank, joined.world)
    origin = Origin(model, traced.skeleton, weights, seed, say=talk, read=trained.read)
    own = own_states(joined, part, traced, sharding, origin)
    transport = connect(joined, part)
    held = hold(part, own.states, joined.backend, partial=replicated(sharding), offload=offload)
    replicas = replicas_of_last_stage(part, joined.backend)
    rank = Rank(part, checked.compute, transport, held, checked.emitted, replicas)
    evaluation = partial(split_to_evaluate, model, loss, part, sharding)
    shorter = traces_at_lengths(model, traced.example, loss, plan)
    at_length = partial(split_at_length, shorter, part, sharding)
    clipping = Clipping(
        held.gradients,
        sharding,
        joined.place,
        joined.world,
        parts=plan.parted,
        stages=plan.mesh.pp > 1,
        parted=parted_dims(held.gradients, sharding),
        own=own_parts(held.gradients, sharding, joined.place),
    )
    unmoved = Unmoved(
        model,
        skeleton=traced.skeleton,
        example=traced.example,
        loss=loss,
        plan=plan,
        held=held.states,
        trained=held.gradients.shards(),
        clipping=clipping,
        graph=traced.trace.graph,
        speaks=joined.place.rank == 0,
    )
    return Pipe(
        rank,
        own,
        joined.watchdog,
        joined.world,
        evaluation,
        at_length,
        seed=seed,
        clipping=clipping,
        unmoved=unmoved.step,
    )
