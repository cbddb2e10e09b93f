"""Put a plan's sheet together, and prove it at the plan's own sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopipe.errors import AutopipeError
from autopipe.planfile import predict, programs
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import BUCKET_BYTES, Batch, StagePlan
from autopipe.scaling import links
from autopipe.scaling.evaluate import at
from autopipe.scaling.expressions import ROWS, TOKENS, Expression, product, total, value
from autopipe.scaling.moments import Numbering, moments
from autopipe.scaling.paths import paths
from autopipe.scaling.sheet import Count, Form, Point, RankBytes, Sheet, StageStates
from autopipe.scaling.stops import Stops
from autopipe.schedules.instructions import Channel, Flow, Kind, Programs, holders
from autopipe.util import numbers


@dataclass(frozen=True)
class StageFormulas:
    """The formulas of one stage for a micro-batch, in b, s and w; `schedules.peak_memory.Sizes`
    explains the first five sizes.

    Attributes:
        forward, backward: seconds.
        kept, stash, fresh, made, momentary: bytes.
        sends: bytes of each tensor that it sends on, by name.
        passing: bytes that exist only within its loss's backward.
        largest: bytes of its largest gradient.
        added: the same bytes, if that gradient exists beside its sum and is not in `made`.
        wide: additional bytes of gradients while they are cast to fp32 for the optimizer.
    """

    forward: Expression
    backward: Expression
    kept: Expression
    stash: Expression
    fresh: Expression
    made: Expression
    momentary: Expression
    sends: Mapping[str, Expression]
    passing: Expression
    largest: int
    added: int
    wide: int


def sheet_of(
    plan: Plan,
    formulas: Sequence[StageFormulas],
    stops: Stops,
    flops: Expression,
) -> Sheet:
    """The sheet of a plan.

    Args:
        formulas: the formulas of each stage.
        stops: the sizes for which the sheet has to hold.
        flops: model FLOPs of b rows.

    Raises:
        AutopipeError: at the plan's own sizes the sheet's figures differ from the plan's.
    """
    own = plan.batch.micro_batches
    channels = [*dict.fromkeys(_channels(plan))]
    stages = len(plan.stages)
    costs: list[Expression] = [f.forward for f in formulas] + [f.backward for f in formulas]
    costs += links.sums(plan, [f.backward for f in formulas])
    ways: dict[Channel, tuple[Form, Form]] = {}
    for channel in channels:
        latency, byte = links.wire(plan, channel)
        ways[channel] = ((len(costs), 1.0),), ((len(costs) + 1, 1.0),)
        costs += [latency, product(_moved(plan, formulas, channel), byte)]
    numbering = Numbering.of(plan)
    sizes = _sizes(formulas, numbering)
    values = [[value(cost, point) for cost in costs] for point in stops.corners()]
    made: dict[int, Count] = {}
    for count in sorted({own, *stops.counts(plan)}):
        step = _programs(plan, count)
        made[count] = Count(
            paths(step, _costed(stages), ways, values),
            _moments(plan, step, numbering, {n for n, size in enumerate(sizes) if size == 0.0}),
        )
    share = 1 / plan.mesh.pp
    found = Sheet(
        pp=plan.mesh.pp,
        dp=plan.mesh.dp,
        tp=plan.mesh.tp,
        schedule=plan.schedule,
        zero=plan.zero,
        again=len({block for stage in plan.stages for block in stage.recompute}),
        devices=len(plan.mesh.places),
        rows=plan.batch.microbatch_rows(plan.mesh.dp),
        tokens=stops.tokens[-1],
        micro_batches=own,
        costs=tuple(costs),
        computing=tuple((number, share) for number in range(2 * stages)),
        sizes=tuple(sizes),
        ranks=tuple(_ranks(plan, formulas, stops.tokens[-1])),
        counts=made,
        flops=flops,
        peak=plan.work.peak if plan.work is not None else 0.0,
        binding=plan.planner.binding,
    )
    _prove(plan, found)
    return found


def _channels(plan: Plan) -> Iterable[Channel]:
    placed = holders(programs.compute(plan))
    for edge in programs.edges(plan):
        if placed[edge.source] != placed[edge.target]:
            yield Channel(edge.source, edge.target, Flow.ACTIVATION)
            if edge.gradient:
                yield Channel(edge.target, edge.source, Flow.GRADIENT)


def _moved(plan: Plan, formulas: Sequence[StageFormulas], channel: Channel) -> Expression:
    """Bytes of a micro-batch on a channel."""
    source, target = sorted(channel[:2])
    back = channel.flow is Flow.GRADIENT
    return total(
        *(
            formulas[source].sends[sent.name]
            for sent in plan.stages[source].sends
            if sent.peer == target and (sent.gradient or not back)
        )
    )


def _sizes(formulas: Sequence[StageFormulas], numbering: Numbering) -> list[Expression]:
    own = [size for f in formulas for size in (f.kept, f.stash, f.fresh, f.made, f.momentary)]
    sent = {name: size for f in formulas for name, size in f.sends.items()}
    return own + [sent[name] for name in numbering.tensors]


def _costed(stages: int) -> dict[Kind, list[Form]]:
    """The costs of each stage's instructions; half a backward takes half of its seconds."""

    def each(first: int, times: float) -> list[Form]:
        return [((first + stage, times),) for stage in range(stages)]

    return {
        Kind.FORWARD: each(0, 1.0),
        Kind.BACKWARD: each(stages, 1.0),
        Kind.BACKWARD_INPUT: each(stages, 0.5),
        Kind.BACKWARD_WEIGHT: each(stages, 0.5),
        Kind.REDUCE: each(2 * stages, 1.0),
    }


def _programs(plan: Plan, micro_batches: int) -> Programs:
    """The plan's step with another number of micro-batches."""
    rows = plan.batch.microbatch_rows(plan.mesh.dp) * plan.mesh.dp * micro_batches
    return programs.step(replace(plan, batch=Batch(rows, micro_batches)))


def _moments(
    plan: Plan, step: Programs, numbering: Numbering, zeros: set[int]
) -> tuple[tuple[dict[int, Form], ...], ...]:
    placed = holders(programs.compute(plan))
    return tuple(
        moments(
            plan,
            program,
            [stage for stage, holder in enumerate(placed) if holder == rank],
            numbering,
            zeros,
        )
        for rank, program in enumerate(step)
    )


def _ranks(plan: Plan, formulas: Sequence[StageFormulas], tokens: int) -> Iterable[RankBytes]:
    where = {ROWS: plan.batch.microbatch_rows(plan.mesh.dp), TOKENS: tokens}
    placed, numbered = holders(programs.compute(plan)), predict.devices(plan)
    row, limits = plan.cluster.row, plan.planner.limits
    for rank in range(plan.mesh.pp):
        own = numbered[plan.mesh.rank(rank, 0) : plan.mesh.rank(rank + 1, 0)]
        rooms = [row[device].memory for device in own]
        room = min(rooms + [*limits] if len(limits) == 1 else rooms)
        stages = {
            stage: _stage_bytes(plan, plan.stages[stage], formulas[stage], where)
            for stage, holder in enumerate(placed)
            if holder == rank
        }
        yield RankBytes(stages, room)


def _stage_bytes(
    plan: Plan, stage: StagePlan, formulas: StageFormulas, where: Mapping[str, float]
) -> StageStates:
    memory = stage.predicted.memory
    held = memory.peak - memory.activations - memory.transfers
    if plan.scatters:  # temporary gradients have the same size whatever the rows
        return StageStates(held - round(value(formulas.passing, where)), 0, 0, formulas.passing)
    held -= memory.passing
    bucket = max(BUCKET_BYTES, formulas.largest) if plan.mesh.dp > 1 else 0
    bucket = max(min(bucket, memory.gradients), formulas.wide)
    return StageStates(held, formulas.added, bucket, formulas.passing)


EXACT = 1e-6
"""The share by which seconds may differ for rounding."""


def _prove(plan: Plan, found: Sheet) -> None:
    """Compare a sheet with its plan, at the plan's own sizes."""
    bandwidth = links.farthest(plan.cluster).link.bandwidth
    outcome = at(found, Point(plan.batch.rows, found.rows, found.tokens, bandwidth))
    assert outcome is not None, "a sheet has its plan's own micro-batches"
    planned = plan.prediction.step_seconds
    if not math.isclose(outcome.step_seconds, planned, rel_tol=EXACT):
        said, meant = map(numbers.seconds, (outcome.step_seconds, planned))
        raise AutopipeError(f"its formulas give a step of {said}, the plan {meant}")
    placed = holders(programs.compute(plan))
    for rank, peak in enumerate(outcome.peaks):
        own = [s for s, holder in zip(plan.stages, placed, strict=True) if holder == rank]
        meant_bytes = sum(stage.predicted.memory.peak for stage in own)
        if peak != meant_bytes:
            raise AutopipeError(
                f"its formulas give {numbers.memory(peak)} on rank {rank}, the plan "
                f"{numbers.memory(meant_bytes)}"
            )
