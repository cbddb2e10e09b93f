"""Convert plans and timelines to plain JSON data, for programs.

Seconds and bytes are the only units; a share is between 0 and 1.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autopipe.planfile import predict, programs
from autopipe.planfile.contents import Plan
from autopipe.schedules.instructions import holders
from autopipe.schedules.registry import flying
from autopipe.schedules.simulate import COMPUTE, Timeline
from autopipe.util import codec

Figures = dict[str, Any]


def whole(plan: Plan) -> Figures:
    """A plan's content, as in its file, with the figures that follow from it (`of_plan`)."""
    return {"plan": codec.to_json(plan), "figures": of_plan(plan)}


def of_plan(plan: Plan) -> Figures:
    """The figures of a plan: degrees, seconds, bytes and shares.

    pp, dp, tp               degrees
    devices, devices_idle    of the cluster: those with a rank, and the others
    rows, micro_batches      of the whole batch; on each replica
    micro_batch_rows         b
    schedule, precision, zero
    step_seconds, bubble     predicted; the share for which the mean rank does not compute
    bound_seconds            no plan takes less, by the planner's estimate
    stages                   of each: rank (along pp), forward_seconds and backward_seconds of a
                             micro-batch, bubble of its rank, peak_bytes, bytes by part
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
        "zero": plan.zero,
        "step_seconds": plan.prediction.step_seconds,
        "bubble": plan.prediction.bubble,
        "bound_seconds": plan.planner.bound_seconds,
        "stages": stages,
    }


def of_timeline(name: str, timeline: Timeline) -> Figures:
    """The data of a drawn step; its times have the unit of the given costs.

    name                     as it was asked for
    seconds, bubble          of the step; the share for which the mean rank does not compute
    ranks                    of each: bubble, the micro-batches held of each of its stages, and
                             spans: instruction (`0F1`: stage, F forward, micro-batch), start, end,
                             computes (or it waits)
    transfers                of each: source and target stage, micro_batch, flow (activation or
                             gradient), start, sent (off the wire), arrival
    """
    ranks: list[Figures] = []
    for program, bubble in zip(timeline.programs, timeline.bubbles, strict=True):
        stages = sorted({instruction.stage for instruction in program})
        held = {str(stage): flying(program, stage) for stage in stages}
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
