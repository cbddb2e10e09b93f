"""Compares, on unequal devices, a plan made for equal devices with autopipe's plan for these.

A planner that knows one kind of device gets the slowest rate and the smallest memory of all. Its
decision is then estimated on the true devices, where faster devices make it faster.

    true machine      A100-80GB x 2, A100-40GB x 4, RTX4090 x 2    problem, decision, seconds
    as if             RTX4090 x 8                                  problem, decision
                                                                            '-> seconds on the true
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from autopipe.batch.cut import two_rows
from autopipe.batch.description import describe
from autopipe.cluster.cluster import Cluster
from autopipe.cluster.tp_groups import tp_groups
from autopipe.frontend.measured_optimizer import optimizer_factor
from autopipe.ir.blocks import find_blocks
from autopipe.ir.cut_points import find_units
from autopipe.ir.dataflow import analyse
from autopipe.planfile.contents import ZERO
from autopipe.planners.costs.profile import Costing
from autopipe.planners.driver.arguments import WINDOW
from autopipe.planners.model.devices import machine_of
from autopipe.planners.model.estimate import estimate
from autopipe.planners.model.problem import Constraints, Decision
from autopipe.planners.search.registry import PLANNERS
from autopipe.tracing.capture.low_precision import KEPT
from autopipe.tracing.source import trace_source


class Compared(NamedTuple):
    """Decisions, and their seconds on the true machine; `thought`: what the equal one expected."""

    ours: Decision
    seconds: float
    equal: Decision
    equal_seconds: float
    thought: float


def compare(
    model: Callable[[], nn.Module],
    inputs: Callable[[int], Any],
    cluster: Cluster,
    rows: int,
    precision: str,
) -> Compared:
    """The best plan for a mixed cluster, and the best one for as many of its slowest device."""
    example = inputs(2)
    specs = describe(example, inputs(3), 2, 3)
    two = two_rows(example, specs)
    traced = trace_source(model, two, specs, None, kept=KEPT.get(precision))
    flow, blocks = analyse(traced.graph), find_blocks(traced.graph)
    units = find_units(flow, blocks, at_least=1)
    true, kinds = machine_of(cluster, tp_groups(cluster, 1))
    equal = replace(
        true,
        kinds=(len(kinds) - 1,) * true.devices,
        memory=(min(true.memory),) * true.devices,
    )
    problem, *_ = Costing(
        flow=flow,
        blocks=blocks,
        units=units,
        machine=true,
        kinds=kinds,
        batch=rows,
        rows=[size for size in range(1, rows + 1) if rows % size == 0],
        optimizer_factor=optimizer_factor(torch.optim.AdamW),
        window=WINDOW,
        constraints=Constraints(),
        precision=precision,
        zeros=ZERO,
    ).profiled()
    ours = PLANNERS["dynamic"](problem)
    for_equal = PLANNERS["dynamic"](replace(problem, machine=equal))
    decision = replace(for_equal.decision, groups=tuple(range(for_equal.decision.config.pp)))
    on_true = estimate(problem, decision)
    return Compared(
        ours.decision,
        ours.estimate.step_seconds,
        decision,
        on_true.step_seconds,
        for_equal.estimate.step_seconds,
    )
