"""What a plan's step computes, and what the seconds of its stages go to, for the plan to tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autopipe.cluster import datasheets
from autopipe.cluster.cluster import Device
from autopipe.ir import op_costs, op_seconds
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import Graph, Input
from autopipe.planfile import predict
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import InputSpec
from autopipe.planfile.work import Spent, Work
from autopipe.planners.costs.precision_of import computed_in
from autopipe.planners.driver.candidate import Candidate
from autopipe.planners.model.estimate import AGAIN, COPYING, EXCHANGES, GATHERING
from autopipe.planners.search.best import Answer


def with_work(plan: Plan, candidate: Candidate, answer: Answer) -> Plan:
    """The plan with its work, and with what each stage's seconds go to.

    Args:
        answer: of the candidate's problem, by whose seconds the plan was chosen.
    """
    row, numbers = plan.cluster.row, predict.devices(plan)
    each = plan.mesh.dp * plan.mesh.tp
    ranks = [
        [row[number] for number in numbers[pp * each : (pp + 1) * each]]
        for pp in range(plan.mesh.pp)
    ]
    graph = candidate.job.traced.graph  # the whole model, not a tensor-parallel rank's
    firsts = (stage.first for stage in plan.once)
    spent = dict(zip(firsts, _spent(candidate, answer), strict=True))
    stages = tuple(
        replace(stage, predicted=replace(stage.predicted, spent=spent[stage.first]))
        for stage in plan.stages
    )
    flops = model_flops(graph, plan.precision, plan.batch.rows)
    if (whole := candidate.job.traced.whole) is not None:
        flops += model_flops(whole.loss, plan.precision, plan.batch.rows)
    tokens = plan.batch.rows * row_tokens(graph, plan.inputs)
    return replace(plan, work=work(flops, ranks, tokens), stages=stages)


def model_flops(graph: Graph, precision: str, rows: int) -> Counter[str]:
    """The operations that MFU counts, of forward and backward of so many rows, by dtype."""
    formulas, flops = op_costs.costs(graph), Counter[str]()
    flops_by_node = op_seconds.model_flops(formulas, rows).tolist()
    for dtype, number in zip(computed_in(graph, formulas, precision), flops_by_node, strict=True):
        if number:
            flops[op_seconds.rate_name(dtype)] += number
    return flops


def work(flops: Counter[str], ranks: Sequence[Sequence[Device]], tokens: int) -> Work | None:
    """What a step computes, of its operations by dtype; None: it multiplies no matrices.

    Args:
        ranks: the devices of each pipeline rank.
    """
    if not flops:
        return None
    dtype, _ = flops.most_common(1)[0]
    rates = [[device.flops[dtype] for device in devices] for devices in ranks]
    sheets = [[datasheets.peak(device, dtype) or 0.0 for device in devices] for devices in ranks]
    # TF32 is faster than the fp32 of a datasheet.
    measured = any(
        rate > peak
        for of in zip(rates, sheets, strict=True)
        for rate, peak in zip(*of, strict=True)
    )
    peaks = tuple(map(sum, rates if measured else sheets))
    return Work(flops.total(), peaks, dtype, measured, tokens)


def row_tokens(graph: Graph, inputs: Sequence[InputSpec]) -> int:
    """The tokens of a row: the length of the longest leaf of (rows, length) that an embedding looks
    up, itself or as a view: GPT-2 and OPT begin with `ids.view(-1, ids.shape[-1])`. 0 if there is
    none: the rows are images, or tables."""
    root = analyse(graph).root
    looked_up = {
        owner.path
        for node in graph.nodes
        if node.op == "aten.embedding.default"
        for value in node.values()
        if isinstance(owner := root[value], Input)
    }
    lengths = [
        leaf.shape[1]
        for leaf in inputs
        if leaf.path in looked_up and leaf.batch_dim == 0 and len(leaf.shape) == 2
    ]
    return max((length for length in lengths if isinstance(length, int)), default=0)


def _spent(candidate: Candidate, answer: Answer) -> tuple[Spent, ...]:
    """What each stage's seconds are spent on, as the answer was chosen by them."""
    costing, config = candidate.costing, answer.decision.config
    rows = config.microbatch_rows(costing.batch)
    parts = {kind: costing.parts(rows, kind) for kind in {s.kind for s in answer.estimate.stages}}
    spent_by_stage = []
    for stage in answer.estimate.stages:
        computing = parts[stage.kind][:, stage.first : stage.last + 1].sum(axis=1).tolist()
        # The pass before a loss over the whole batch is computed a second time by the next pass.
        forward = costing.timed.profile(rows).forward[stage.kind][stage.first : stage.last + 1]
        first_pass = sum(forward) * (costing.forwards - 1) / costing.forwards
        spent = dict(stage.spent)
        spent[AGAIN] += first_pass
        causes = AGAIN, EXCHANGES, GATHERING, COPYING
        spent_by_stage.append(Spent(*computing, *(spent[cause] for cause in causes)))
    return tuple(spent_by_stage)
