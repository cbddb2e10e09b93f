"""Convert plans and timelines to plain JSON data, for programs.

Seconds and bytes are the only units; a share is between 0 and 1.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autopipe.cluster import datasheets
from autopipe.planfile import predict, programs
from autopipe.planfile.contents import Plan
from autopipe.planfile.waterfall import mfu, tokens_per_second, waterfall
from autopipe.report import fullest
from autopipe.schedules.instructions import COMPUTE, holders, stages_of
from autopipe.schedules.registry import flying
from autopipe.schedules.simulate import Timeline
from autopipe.util import codec

Figures = dict[str, Any]


def whole(plan: Plan) -> Figures:
    """A plan's content, as in its file, with the figures that follow from it (`of_plan`)."""
    return {"plan": codec.to_json(plan), "figures": of_plan(plan)}


def of_plan(plan: Plan) -> Figures:
    """The figures of a plan: degrees, seconds, bytes and shares.

    pp, dp, tp               degrees
    devices, devices_idle    of the cluster: those with a rank, those without
    rows, micro_batches      of the whole batch; on each replica
    micro_batch_rows         b
    schedule, precision, grad_dtype, optimizer_dtype, zero
    step_seconds, bubble     predicted; the share for which the mean rank does not compute
    bound_seconds            no plan takes less, by the planner's estimate
    tokens                   of the whole batch; 0 where rows are no sequences
    rows_per_second, tokens_per_second, hours_per_billion_tokens, flops_per_second
                             of one device; hours of one device; null: not known
    mfu                      the share of the devices' peak, which `peak_dtype` and
                             `peak_measured` describe; null: not known
    seconds                  of the step by cause (`planfile.waterfall`); they add up to
                             step_seconds
    fullest                  the device that has least room: its rank, stages, bytes by part,
                             margin_bytes (kept from tensors; null: not known), and `at`, the
                             instruction (null: not known)
    stages                   of each: rank (along pp), forward_seconds and backward_seconds of a
                             micro-batch, spent (both by cause; null: not known), bubble
                             of its rank, peak_bytes, bytes by part
    """
    mesh, rows = plan.mesh, plan.batch.rows
    bubbles = predict.timeline(plan).bubbles
    stages = []
    for stage, rank in zip(plan.stages, holders(programs.compute(plan)), strict=True):
        found = stage.predicted
        stages.append(
            {
                "rank": rank,
                "forward_seconds": found.forward_seconds,
                "backward_seconds": found.backward_seconds,
                "spent": None if found.spent is None else asdict(found.spent),
                "bubble": bubbles[rank],
                "peak_bytes": found.memory.peak,
                "bytes": asdict(found.memory),
            }
        )
    return {
        "pp": mesh.pp,
        "dp": mesh.dp,
        "tp": mesh.tp,
        "devices": len(mesh.places),
        "devices_idle": plan.cluster.num_devices - len(mesh.places),
        "rows": rows,
        "micro_batches": plan.batch.micro_batches,
        "micro_batch_rows": plan.batch.microbatch_rows(mesh.dp),
        "schedule": plan.schedule,
        "precision": plan.precision,
        "grad_dtype": plan.grad_dtype,
        "optimizer_dtype": plan.optimizer_dtype,
        "zero": plan.zero,
        "step_seconds": plan.prediction.step_seconds,
        "bubble": plan.prediction.bubble,
        "bound_seconds": plan.planner.bound_seconds,
        **_speed(plan),
        "seconds": waterfall(plan),
        "fullest": _fullest(plan),
        "stages": stages,
    }


def _speed(plan: Plan) -> Figures:
    step, devices, work = plan.prediction.step_seconds, len(plan.mesh.places), plan.work
    tokens = tokens_per_second(plan)
    return {
        "tokens": work.tokens if work is not None else 0,
        "rows_per_second": plan.batch.rows / step / devices if step else None,
        "tokens_per_second": tokens,
        "hours_per_billion_tokens": 1e9 / tokens / 3600 if tokens else None,
        "flops_per_second": work.flops / step / devices if work is not None and step else None,
        "mfu": mfu(plan),
        "peak_dtype": work.dtype if work is not None else None,
        "peak_measured": work.measured if work is not None else None,
    }


def _fullest(plan: Plan) -> Figures:
    found = fullest.fullest(plan)
    memories = [asdict(plan.stages[stage].predicted.memory) for stage in found.stages]
    return {
        "rank": found.rank,
        "stages": list(found.stages),
        "at": plan.stages[found.stages[0]].predicted.fullest or None,
        "peak_bytes": found.held,
        "bytes": {part: sum(memory[part] for memory in memories) for part in memories[0]},
        "margin_bytes": datasheets.margin(found.device),
    }


def of_timeline(name: str, timeline: Timeline) -> Figures:
    """The data of a drawn step; its times have the unit of the given costs.

    name                     the name or file that was asked for
    seconds, bubble          of the step; the share for which the mean rank does not compute
    ranks                    of each: bubble, the micro-batches held of each of its stages, and
                             spans: instruction (`0F1`: stage, F forward, micro-batch), start, end,
                             computes (or it waits)
    transfers                of each: source and target stage, micro_batch, flow (activation or
                             gradient), start, sent (off the wire), arrival
    """
    ranks: list[Figures] = []
    for program, bubble in zip(timeline.programs, timeline.bubbles, strict=True):
        held = {str(stage): flying(program, stage) for stage in stages_of(program)}
        ranks.append({"bubble": bubble, "held": held, "spans": []})
    for span in timeline.spans:
        ranks[span.rank]["spans"].append(
            {
                "instruction": str(span.instruction),
                "start": span.start,
                "end": span.end,
                "computes": span.instruction.kind in COMPUTE,
            }
        )
    return {
        "name": name,
        "seconds": timeline.seconds,
        "bubble": timeline.bubble,
        "ranks": ranks,
        "transfers": [
            {
                "source": moved.channel.source,
                "target": moved.channel.target,
                "micro_batch": moved.microbatch,
                "flow": moved.channel.flow.name.lower(),
                "start": moved.start,
                "sent": moved.sent,
                "arrival": moved.arrival,
            }
            for moved in timeline.transfers
        ],
    }
