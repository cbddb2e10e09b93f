"""The farthest link of a plan's cluster, and what in its step depends on that link's bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopipe.cluster.cluster import Cluster, Link
from autopipe.cluster.efficiency import BESIDE
from autopipe.planfile import predict
from autopipe.planfile.contents import Plan
from autopipe.scaling.expressions import BANDWIDTH, Expression, largest, product, total
from autopipe.schedules.instructions import Channel


@dataclass(frozen=True)
class Farthest:
    """The farthest link of a cluster.

    Attributes:
        words: the places that the link joins.
        link: latency in seconds, bandwidth in bytes a second.
    """

    words: str
    link: Link


def farthest(cluster: Cluster) -> Farthest:
    """The farthest link that joins devices of a cluster."""
    if cluster.across is not None:
        return Farthest("between sites", cluster.across)
    if len(cluster.devices_per_node) > 1:
        return Farthest("between nodes", cluster.between)
    return Farthest("within the node", cluster.link_of(cluster.nodes[0]))


def with_bandwidth(cluster: Cluster, bandwidth: float) -> Cluster:
    """A cluster whose farthest link has another bandwidth; its latency stays."""
    times = bandwidth / farthest(cluster).link.bandwidth
    if cluster.across is not None:
        return replace(cluster, across=faster(cluster.across, times))
    if len(cluster.devices_per_node) > 1:
        return replace(cluster, between=faster(cluster.between, times))
    nodes = tuple(
        replace(node, within=None if node.within is None else faster(node.within, times))
        for node in cluster.nodes
    )
    return replace(cluster, within=faster(cluster.within, times), nodes=nodes)


def faster(link: Link, times: float) -> Link:
    """A link with so many times the bandwidth, of collectives too; its latency stays."""
    return replace(
        link,
        bandwidth=times * link.bandwidth,
        summing=times * link.summing,
        gathering=times * link.gathering,
    )


def on_farthest(cluster: Cluster, seconds: Callable[[Cluster], float]) -> Expression:
    """Seconds on a cluster as a formula max(a, b + c / w) in the bandwidth w of its farthest link.

    Where nearer links are what is waited for, the farthest takes none of the seconds.

    Args:
        seconds: the function from a cluster to seconds.
    """
    bandwidth = farthest(cluster).link.bandwidth
    slow, slower = _APART * bandwidth, _APART / 2 * bandwidth
    once, twice = (seconds(with_bandwidth(cluster, at)) for at in (slow, slower))
    moved = (twice - once) * slow
    least = seconds(with_bandwidth(cluster, bandwidth / _APART))
    if moved / bandwidth <= 1e-12 * least:
        return seconds(cluster)
    waits = max(0.0, 2 * once - twice)
    depends = total(waits, product(moved, ("^", BANDWIDTH, -1.0)))
    return depends if least - waits <= 1e-6 * waits + _LITTLE else largest(least, depends)


_APART = 1e-4
"""The ratio of a bandwidth at which the farthest link alone is waited for."""

_LITTLE = 1e-9
"""Seconds that no one notices."""


def sums(plan: Plan, backward: Sequence[Expression]) -> list[Expression]:
    """Each stage's seconds of summing gradients, without what its last backward hides, as formulas.

    Args:
        backward: each stage's seconds of a backward.
    """

    def of(stage: int, part: int) -> Expression:
        return on_farthest(
            plan.cluster, lambda cluster: predict.sums(replace(plan, cluster=cluster))[stage][part]
        )

    last, found = predict.last_share(plan), []
    for stage, computing in enumerate(backward):
        beside, after = of(stage, 0), of(stage, 1)
        left = total(beside, product(-last, computing))
        found.append(total(after, largest(product(BESIDE, beside), left) if beside else 0.0))
    return found


def wire(plan: Plan, channel: Channel) -> tuple[float, Expression]:
    """A channel's latency in seconds, and the seconds that a byte occupies it."""

    def a_byte(cluster: Cluster) -> float:
        return 1 / predict.costs(replace(plan, cluster=cluster)).links(channel).bandwidth

    latency = predict.costs(plan).links(channel).latency
    return latency, on_farthest(plan.cluster, a_byte)
