"""How long ranks take to sum or to send, from the links between them: the alpha-beta model.

A message of S bytes takes latency + S / bandwidth (Hockney, Parallel Computing 1994). Ranks that
sum do so level by level, n_l at level l, each level with the shard that the one before left it:

    level 0, a node      n_0 ranks    reduce-scatter of S                          ... all-gather
    level 1, a site      n_1 nodes      reduce-scatter of S / n_0          ... all-gather
    level 2              n_2 sites        reduce-scatter and all-gather of S / (n_0 n_1)

A reduce-scatter or an all-gather on a ring takes (n - 1) / n * S / bandwidth + (n - 1) * latency
(Patarasuk and Yuan, JPDC 2009); on a tree a sum's latencies grow with log2 n instead, 2 log2 n of
them (Sanders, Speck and Traeff, Parallel Computing 2009, as NCCL has it). The quicker is taken.

The bandwidth is that of messages, unless a link has been measured under collectives
(`Link.summing`, `Link.gathering`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopipe.cluster.cluster import Cluster, Link


class Level(NamedTuple):
    """`ranks` that exchange over links of one kind, each for all ranks of the levels below it.

    `shared`: whether all ranks of one place send over one wire.
    """

    ranks: int
    link: Link
    shared: bool = False

    def wire(self, senders: int) -> Link:
        """The link as each of `senders` ranks of one place has it if all of them send at once."""
        turns = senders if self.shared else 1
        return replace(self.link, bandwidth=self.link.bandwidth / turns)


def slowest(pairs: Iterable[Level]) -> Level:
    """The level where a message takes longest: a shared wire, and then the least bandwidth."""
    return max(pairs, key=lambda level: (level.shared, -level.link.bandwidth))


Levels = tuple[Level, ...]
"""From the nearest ranks to the farthest; none for a rank alone."""


def all_reduce(size: float, levels: Levels, streams: int = 1) -> float:
    """Seconds in which `size` bytes are summed over all ranks of the levels.

    Args:
        streams: the number of groups that sum at the same time, side by side, over shared links.
    """
    return _ringed(size, levels, streams, 2, lambda link: link.summing)


def all_gather(size: float, levels: Levels, streams: int = 1) -> float:
    """Seconds in which every rank gets all `size` bytes of which each has a part.

    A reduce-scatter of as many bytes takes as long.
    """
    return _ringed(size, levels, streams, 1, lambda link: link.gathering)


def gradient_sum(size: float, levels: Levels, streams: int, zero: int, copying: float) -> float:
    """Seconds in which `size` bytes of gradients are summed, under ZeRO 0 or 1.

    Under ZeRO-1 it is a reduce-scatter, and an all-gather when the next step begins; `size` is the
    mean of what the two move.

    Beside the wire, gradients move in a rank's own memory: into a bucket, a read and a write
    (`parameters.gradient_sum`), or into a table that was zeros before, and parameters out of one
    (`parameters.zero1`).

    Args:
        copying: bytes a second of a rank's own memory.
    """
    if not levels:
        return 0.0
    halves = 2 * all_gather(size, levels, streams)  # rings both; an all-reduce may be a tree
    wire = halves if zero else all_reduce(size, levels, streams)
    return wire + _COPIES[zero] * size / copying


def half_sum(size: float, levels: Levels, streams: int, copying: float) -> float:
    """Seconds of one half of ZeRO-1's exchange, as under ZeRO-2: scattering `size` bytes of
    gradients in a backward, or gathering `size` bytes of parameters."""
    if not levels:
        return 0.0
    return all_gather(size, levels, streams) + _COPIES[1] / 2 * size / copying


def summed_beside(size: float, levels: Levels, streams: int, zero: int, copying: float) -> float:
    """Seconds of a sum of `size` bytes of gradients that may run while the last backward makes
    them: all of it under ZeRO-0, under ZeRO-1 the half that scatters; later stages have none."""
    if zero:
        return half_sum(size, levels, streams, copying) if zero == 1 else 0.0
    return gradient_sum(size, levels, streams, 0, copying)


_COPIES = {0: 2, 1: 6}
"""Times that gradients move beside the wire, by ZeRO stage."""


def _ringed(
    size: float, levels: Levels, streams: int, rounds: int, measured: Callable[[Link], float]
) -> float:
    seconds, below = 0.0, 1
    for ranks, link, shared in levels:
        moved = size * (1 if shared else 1 / below) * (streams if shared else 1)
        hops = ranks - 1 if rounds == 1 else min(ranks - 1, math.ceil(math.log2(max(ranks, 2))))
        bandwidth = measured(link) or link.bandwidth
        seconds += rounds * (hops * link.latency + (ranks - 1) / ranks * moved / bandwidth)
        below *= ranks
    return seconds


@dataclass(frozen=True)
class Topology:
    """Where devices stand, and the links that join them.

    Args:
        nodes, sites: for each device the number of its node and of its site.
        within: the link within each node.
        between, across: the links of `Cluster`.
    """

    nodes: tuple[int, ...]
    sites: tuple[int, ...]
    within: tuple[Link, ...]
    between: Link
    across: Link | None = None

    @staticmethod
    def of(cluster: Cluster) -> Topology:
        """The topology of a cluster's devices."""
        nodes: list[int] = []
        sites: list[int] = []
        within: list[Link] = []
        for node in cluster.nodes:
            for _ in range(node.count):
                nodes += [len(within)] * node.num_devices
                sites += [node.site] * node.num_devices
                within.append(cluster.link_of(node))
        return Topology(tuple(nodes), tuple(sites), tuple(within), cluster.between, cluster.across)

    def at(self, devices: Sequence[int]) -> Topology:
        """The topology of some of the devices."""
        nodes, sites = ([row[device] for device in devices] for row in (self.nodes, self.sites))
        return replace(self, nodes=tuple(nodes), sites=tuple(sites))

    def pair(self, one: int, other: int) -> Level:
        """The link between two devices."""
        return self.farthest([one, other])

    def levels(self, devices: Sequence[int]) -> Levels:
        """The levels over which a group of devices exchanges; one flat level if uneven."""
        if len(devices) == 1:
            return ()
        by_node = Counter(self.nodes[device] for device in devices)
        by_site = Counter(self.sites[device] for device in devices)
        nodes_of = Counter(self.sites[node_device] for node_device in self._firsts(devices))
        for counts in (by_node, by_site, nodes_of):
            if len(set(counts.values())) > 1:
                return (self.farthest(devices),)
        inside, nodes = next(iter(by_node.values())), next(iter(nodes_of.values()))
        found = []
        if inside > 1:
            links = [self.within[node] for node in by_node]
            found.append(Level(inside, max(links, key=a_message)))
        if nodes > 1:
            found.append(Level(nodes, self.between))
        if len(by_site) > 1:
            found.append(self.farthest(devices)._replace(ranks=len(by_site)))
        return tuple(found)

    def _firsts(self, devices: Sequence[int]) -> list[int]:
        """One device of each node."""
        return list({self.nodes[device]: device for device in devices}.values())

    def farthest(self, devices: Sequence[int]) -> Level:
        """The farthest of the links among devices, as one level."""
        ranks = len(devices)
        if len({self.sites[device] for device in devices}) > 1:
            assert self.across is not None, "a checked cluster of several sites has the link"
            return Level(ranks, self.across, shared=True)
        nodes = {self.nodes[device] for device in devices}
        if len(nodes) > 1:
            return Level(ranks, self.between)
        return Level(ranks, self.within[nodes.pop()])


def a_message(link: Link) -> float:
    """Seconds of a message of 1 MiB, by which links are compared."""
    return link.seconds(2**20)
