"""Plans over several nodes, without a model behind them: for what only reads plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopipe.cluster import spec
from autopipe.cluster.cluster import Cluster
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Mesh, Place
from tests.support.plans import chain


def spread(cluster: str, processes: Sequence[int], device: str = "cuda") -> Plan:
    """A chain with a stage on each of so many devices of each node."""
    found = spec.parse(cluster)
    assert isinstance(found, Cluster)
    at = [(node, local) for node, count in enumerate(processes) for local in range(count)]
    places = tuple(
        Place(rank, rank, 0, 0, node, local, "cpu" if device == "cpu" else f"cuda:{local}")
        for rank, (node, local) in enumerate(at)
    )
    plan = chain(len(at), 2 * len(at))
    return replace(plan, cluster=found, mesh=Mesh(len(at), 1, 1, places))


def on_cpus(nodes: int, processes: int) -> Plan:
    """The same on processes of CPUs, equally many on each node."""
    name = f"{nodes}x{processes}xA100-80GB" if nodes > 1 else f"{processes}xA100-80GB"
    return spread(name, [processes] * nodes, device="cpu")
