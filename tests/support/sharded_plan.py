"""A sharded block as a plan writes it down."""

from dataclasses import replace

from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.planfile.contents import Plan
from autopipe.planfile.placements import Sharding
from autopipe.sharding.ilp import shard
from autopipe.sharding.local_graph import shard_graph
from autopipe.sharding.plan_io import write_down
from tests.support.plans import example_plan
from tests.support.simulated import axis
from tests.support.staged import traced

PLAN = example_plan()


def written(name: str) -> tuple[Plan, Sharding]:
    graph = traced(name).graph
    flow, blocks = analyse(graph), find_blocks(graph)
    sharding = shard(flow, blocks, axis(2), 2)
    local = shard_graph(flow, sharding, 0)
    classes, states, collectives = write_down(graph, blocks, sharding, local, 2)
    plan = replace(
        PLAN,
        mesh=replace(PLAN.mesh, tp=2),
        blocks=classes,
        states=states,
        collectives=collectives,
    )
    return plan, sharding
