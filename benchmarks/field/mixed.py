"""What a plan for equal devices takes on unequal ones.

A planner that knows one kind of device is told of the slowest and the smallest. Its plan runs on
the true devices all the same, and where they are faster it is: its decision is put to the planner's
own estimate on the true machine.

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

from autopipe import batches
from autopipe.asked import optimizer_factor
from autopipe.blocks import find_blocks
from autopipe.cluster import Cluster
from autopipe.dataflow import analyse
from autopipe.draft import WINDOW
from autopipe.estimate import estimate
from autopipe.machine import machine_of
from autopipe.plan import ZERO
from autopipe.planners import PLANNERS
from autopipe.problem import Constraints, Decision
from autopipe.profile import Costing
from autopipe.source import trace_source
from autopipe.teams import teams
from autopipe.units import find_units


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
    specs = batches.describe(example, inputs(3), 2, 3)
    traced = trace_source(model, batches.two_rows(example, specs), specs, None)
    flow, blocks = analyse(traced.graph), find_blocks(traced.graph)
    units = find_units(flow, blocks, at_least=1)
    true, kinds = machine_of(cluster, teams(cluster, 1))
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
    decision = replace(for_equal.decision, groups=tuple(range(for_equal.decision.frame.pp)))
    on_true = estimate(problem, decision)
    return Compared(
        ours.decision,
        ours.estimate.step_seconds,
        decision,
        on_true.step_seconds,
        for_equal.estimate.step_seconds,
    )
