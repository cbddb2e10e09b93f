"""Plans of the zoo's GPT, made by `plan` itself, and nodes of devices to make them for."""

from typing import Any

import autopipe
from autopipe import Plan
from autopipe.cluster.cluster import Cluster, Group, Link, NodeGroup
from tests.support.inprocess import machine
from tests.support.zoo import ZOO

CASE = ZOO["gpt"]

NEAR = Link(1e-5, 1e10)


def planned(**options: Any) -> Plan:
    """The zoo's GPT on two processes of 1 GiB, in batches of 8 rows, unless told otherwise.

    Of what a planner may choose there are the mesh of stages and replicas, micro-batches and cuts;
    `free` has all.
    """
    given: dict[str, Any] = {
        "tp": 1,
        "schedule": "1f1b",
        "zero": 0,
        "recompute": "none",
        "model": CASE.model,
        "inputs": CASE.inputs,
        "loss": CASE.loss,
        "cluster": machine(2),
        "batch_size": 8,
        **options,
    }
    return autopipe.plan(given.pop("model"), given.pop("inputs"), **given)


def free(**options: Any) -> Plan:
    """The same, and whatever is not told otherwise is the planner's choice."""
    return planned(**{"tp": None, "schedule": None, "zero": None, "recompute": None, **options})


def parts(plan: Plan, name: str) -> list[int]:
    """That part of the memory of every stage."""
    return [getattr(stage.predicted.memory, name) for stage in plan.stages]


def nodes_of(*sizes: int, within: tuple[Link, ...], site: bool = False) -> Cluster:
    """Nodes of so many equal devices, each with its link; each at a site of its own if asked."""
    device = machine(1).row[0]
    nodes = (
        NodeGroup(1, (Group(size, device),), number if site else 0, link)
        for number, (size, link) in enumerate(zip(sizes, within, strict=True))
    )
    return Cluster("nodes", tuple(nodes), NEAR, between=Link(1e-4, 1e9), across=Link(0.1, 1e9))
