"""State a plan's main facts as sentences, independent of how they are shown.

decided        the split, the schedule, the predicted step, the fullest device: what comes first
idle           the devices that have nothing to do
crossing       what goes over the farthest links
alternatives   other plans, and what keeps them from being this one
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from autopipe.planfile.again import offloaded, repeated
from autopipe.planfile.contents import BATCH, Plan
from autopipe.planfile.parts import Alternative, data_parallel
from autopipe.planfile.traffic import traffic
from autopipe.report import fullest
from autopipe.report.spending import speed
from autopipe.util import numbers
from autopipe.util.numbers import count, percent, ranges


def decided(plan: Plan) -> list[tuple[str, str]]:
    """Pairs of a term and its text, the most important first."""
    mesh, batch, prediction = plan.mesh, plan.batch, plan.prediction
    rows = batch.microbatch_rows(mesh.dp)
    stages = count(len(plan.stages), "pipeline stage")
    if len(plan.stages) > mesh.pp:
        stages += f" on {count(mesh.pp, 'rank')}"
    if plan.turns:
        each = ", ".join(map(str, plan.turns))
        stages = f"{count(len(plan.once), 'pipeline stage')}, at which {each} ranks take turns"
    replicas = " on each replica" if mesh.dp > 1 else ""
    step = prediction.step_seconds
    pace = f", {numbers.rate(batch.rows / step)} rows/s" if step else ""
    tokens = f" ({plan.work.tokens:,} tokens)" if plan.work is not None and plan.work.tokens else ""
    reached = speed(plan)
    pairs = [
        (
            "split",
            f"{stages} (pp) x {count(mesh.dp, 'replica')} (dp) x "
            f"{count(mesh.tp, 'tensor part')} (tp), on {_machines(plan)}",
        ),
        (
            "schedule",
            f"{plan.schedule}; a step's {count(batch.rows, 'row')}{tokens} "
            f"{'goes' if batch.rows == 1 else 'go'} through in "
            f"{count(batch.micro_batches, 'micro-batch', 'micro-batches')}{replicas}, of b = "
            f"{count(rows, 'row')} each",
        ),
        (
            "predicted",
            f"{numbers.seconds(step)} a step{pace}; a device waits "
            f"{percent(prediction.bubble)} of it (the bubble)",
        ),
        *([("speed", reached)] if reached else []),
        ("memory", fullest.room(plan)),
        ("holding", fullest.holding(plan)),
    ]
    idle_devices, as_they_are = idle(plan), ", ".join(region.name for region in plan.regions)
    return [
        *pairs,
        *([("idle", idle_devices)] if idle_devices else []),
        *([("runs as it is", f"{as_they_are}: not looked into")] if as_they_are else []),
        *([("rows", f"of {plan.traced_rows} a micro-batch alone")] if plan.rows_fixed else []),
        *_choices(plan),
    ]


def _machines(plan: Plan) -> str:
    """`all 4 devices of local:4`, `4 of the 6 devices of ...`."""
    used, total = len(plan.mesh.places), plan.cluster.num_devices
    if total == 1:
        return f"one device, {plan.cluster.name}"
    machines = f"all {total:,}" if used == total else f"{used:,} of the {total:,}"
    return f"{machines} devices of {plan.cluster.name}"


def _kept_in_fp32(plan: Plan) -> str:
    """The tensors that a plan with 16-bit parameters keeps in fp32."""
    if not plan.masters:
        return "without fp32 master weights"
    if plan.grad_dtype == "fp32":
        return "with master weights, sums of gradients and optimizer state in fp32"
    return "sums of gradients too, with master weights and optimizer state in fp32"


def _choices(plan: Plan) -> Iterator[tuple[str, str]]:
    """The choices of a plan that are not the usual ones, as terms with texts."""
    if plan.precision.endswith("-autocast"):
        kept = ", fp32 in all that is kept" if plan.products == ("fp32",) else ""
        yield "precision", f"{plan.precision.removesuffix('-autocast')} in matrix products{kept}"
    elif plan.precision != "fp32":
        yield "precision", f"{plan.precision}, {_kept_in_fp32(plan)}"
    if plan.low_buffers:
        first, *others = plan.low_buffers
        more = f" and {len(others)} more" if others else ""
        yield "buffers", f"{first}{more}: read in {plan.precision}, where they meet activations"
    if plan.products != ("fp32",) and plan.precision == "fp32":
        dtypes = " and ".join(plan.products)
        yield "precision", f"{dtypes}, the model's own, in which its tensors are counted and sent"
    if plan.compiled:
        yield "compiled", "memory-bound ops are fused, and run again rather than be kept"
    if plan.fused_attention:
        yield "attention", "fused into one op, where the model writes out its products and softmax"
    if zero := plan.zero_at_work:
        sharded = {
            1: "optimizer state is",
            2: "gradients and optimizer state are",
            3: "parameters, gradients and optimizer state are",
        }
        over = "the replicas" if plan.mesh.dp > 1 else "ranks that take turns at a stage"
        yield "zero", f"{zero}: {sharded[zero]} sharded over {over}"
    again = repeated(plan, plan.stages)
    if again:
        yield "recompute", f"{'; '.join(map(str, again))} run a second time in backward"
    if away := offloaded(plan):
        waits = [spent.copying for stage in plan.stages if (spent := stage.predicted.spent)]
        waiting = "computing hides the copies"
        if any(waits):
            waiting = f"a stage waits {numbers.seconds(max(waits))} a micro-batch for copies"
        keep = "1 block keeps" if len(away) == 1 else f"{len(away)} blocks keep"
        yield "offload", f"{keep} what backward needs in the host's memory; {waiting}"
    if plan.loss_parts:
        parts = count(plan.loss_parts, "part")
        yield "loss", f"from {parts} of the vocabulary; logits are made again in backward, not kept"
    if plan.lengths:
        *others, longest = map(str, plan.lengths)
        looked_at = f"; also checked with {' and '.join(others)}" if others else ""
        yield "lengths", f"rows of up to {longest} tokens, by which all figures are{looked_at}"
    if plan.loss_over == BATCH:
        took = numbers.seconds(plan.loss_seconds)
        yield (
            "loss",
            "of the whole batch, in two passes: forward for what it reads, the loss "
            f"({took}), then forward and backward",
        )
    if any(boundary.depth for boundary in plan.boundaries):
        windows = _each([boundary.window for boundary in plan.boundaries])
        depths = _each([boundary.depth for boundary in plan.boundaries])
        yield "window", f"{windows}: receives posted ahead between a stage and the next"
        yield "depth", f"{depths}: micro-batches in flight there beyond those of 1f1b"


def _each(found: Sequence[int]) -> str:
    """`2`, or `2 2 1` where they differ."""
    return " ".join(map(str, found if len(set(found)) > 1 else found[:1]))


# --- devices that have nothing to do


def idle(plan: Plan) -> str | None:
    """The devices without a rank: `2 of 6 devices ... (node 0: devices 4-5)`; None: none."""
    used: dict[int, set[int]] = {}
    for place in plan.mesh.places:
        used.setdefault(place.node, set()).add(place.local)
    idle_nodes = [
        (node, ranges(local for local in range(size) if local not in used.get(node, ())))
        for node, size in enumerate(plan.cluster.devices_per_node)
        if len(used.get(node, ())) < size
    ]
    if not idle_nodes:
        return None
    total = plan.cluster.num_devices
    texts = []
    for devices, group in groupby(idle_nodes, key=lambda pair: pair[1]):
        nodes = [node for node, _ in group]
        where = f"node{'s' if len(nodes) > 1 else ''} {ranges(nodes)}"
        texts.append(f"{where}: device{'' if devices.isdigit() else 's'} {devices}")
    listed = "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")
    return f"{total - len(plan.mesh.places):,} of {total:,} devices have no work ({listed})"


# --- what goes over the farthest links


def crossing(plan: Plan) -> str | None:
    """The traffic over the slowest links, compared with summing gradients over them."""
    sent = traffic(plan)
    if sent is None:
        return None
    parts = []
    if sent.activations:
        pairs = [f"{first} and {second}" for first, second in sent.pairs]
        between = ", ".join(pairs[:3]) + (" and others" if len(pairs) > 3 else "")
        parts.append(
            f"{numbers.gigabytes(sent.activations)} of activations and "
            f"{numbers.gigabytes(sent.gradients)} of their gradients, between stages {between}; "
            f"the busiest wire carries them for {numbers.seconds(sent.busy)}"
        )
    if sent.sums:
        parts.append(f"{numbers.gigabytes(sent.sums)} {_SUMMING[plan.zero]}")
    else:
        parts.append(
            "summing the gradients of all parameters there would send "
            f"{numbers.gigabytes(sent.sum_of_all)}"
        )
    return f"a step sends between {sent.places} {sent.kind} ({sent.link}): {'; '.join(parts)}"


_SUMMING = {
    0: "to sum the gradients of parameters",
    1: "to scatter the gradients of parameters and gather these (ZeRO-1)",
    2: "to scatter the gradients of parameters in every micro-batch and gather these (ZeRO-2)",
    3: "to gather parameters twice and scatter their gradients in every micro-batch (ZeRO-3)",
}
"""What replicas send each other, by the plan's ZeRO stage."""


# --- why


def alternatives(plan: Plan) -> list[tuple[str, str]]:
    """The other meshes, the best first, each with the reason why it is not the plan."""
    alone = data_parallel(plan.planner.alternatives)
    if plan.mesh.pp == plan.mesh.tp == 1:
        alone = None  # the plan itself is of that kind
    return [
        (_mesh(other) + (" (data parallelism alone)" if other == alone else ""), _step(other))
        for other in plan.planner.alternatives
    ]


def _mesh(other: Alternative) -> str:
    """`pp=4 dp=2 tp=1, 8 micro-batches, 1f1b`."""
    zero = f" zero={other.zero}" if other.zero else ""
    parts = count(other.micro_batches, "micro-batch", "micro-batches")
    return f"pp={other.pp} dp={other.dp} tp={other.tp}{zero}, {parts}, {other.schedule}"


def _step(other: Alternative) -> str:
    """`2.05 s, 3.0 % slower, by transfers`."""
    step = "" if other.step_seconds is None else f"{numbers.seconds(other.step_seconds)}, "
    return f"{step}{other.why}"


def searched(plan: Plan) -> str:
    """How far the search proves that there is no better plan."""
    note = plan.planner
    bound = note.bound_seconds
    gap = max(0.0, note.step_seconds / bound - 1) if bound else 0.0
    return (
        f"planner {note.name}: by its own, rougher estimate this plan takes "
        f"{numbers.seconds(note.step_seconds)} a step and none less than {numbers.seconds(bound)}, "
        f"a gap of {percent(gap)}; the longest path through its programs says "
        f"{numbers.seconds(plan.prediction.step_seconds)}"
    )
