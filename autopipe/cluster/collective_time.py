"""How long ranks take to sum or to send, from the links between them: the alpha-beta model.

A message of S bytes takes latency + S / bandwidth (Hockney, Parallel Computing 1994). n ranks that
gather or scatter do so on rings through all of them, as many as a node has ranks, each with its
part of S. A rank of level l, of which there are n_l, passes on

    level 0, a node      n_0 ranks    (n_0 - 1) / n_0 S
    level 1, a site      n_1 nodes    (n_1 - 1) / n_1 S / n_0
    level 2              n_2 sites    (n_2 - 1) / n_2 S / (n_0 n_1)

on the links of that level, on all levels at once: the slowest of them is what is waited for. A ring
has n - 1 steps (Patarasuk and Yuan, JPDC 2009), of which (n_0 - 1) n_1 n_2 are within nodes and
(n_1 - 1) n_2 between nodes. An all-reduce is two rings, or on a tree 2 log2 n steps of the same
bytes (Sanders, Speck and Traeff, Parallel Computing 2009). The quicker is taken.

So has NCCL it (src/graph/tuning.cc). On H100 its reduce-scatter was measured at 360 GB/s on 4 nodes
and 300 on 32, as a bandwidth of 8 cards of 50 GB/s each and such steps allow, and at 260 on 128
(https://github.com/NVIDIA/nccl/issues/1229); one level after the other would be 186.

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
    steps = min(_ring_steps(levels, 2), _tree_steps(levels))
    return steps + 2 * _slowest_level(size, levels, streams, lambda link: link.sums)


def all_gather(size: float, levels: Levels, streams: int = 1) -> float:
    """Seconds in which every rank gets all `size` bytes of which each has a part.

    A reduce-scatter of as many bytes takes as long.
    """
    return _ring_steps(levels, 1) + _slowest_level(size, levels, streams, lambda link: link.gathers)


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


def _slowest_level(
    size: float, levels: Levels, streams: int, rate: Callable[[Link], float]
) -> float:
    """Seconds on the wires of the level that takes longest, in one round."""
    seconds, below = 0.0, 1
    for ranks, link, shared in levels:
        moved = size * (streams if shared else 1 / below)
        seconds = max(seconds, (ranks - 1) / ranks * moved / rate(link))
        below *= ranks
    return seconds


def _ring_steps(levels: Levels, rounds: int) -> float:
    """Seconds without a byte of the steps of a ring through all ranks."""
    counts, above = [], 1
    for ranks, link, _ in reversed(levels):
        counts.append((rounds * (ranks - 1) * above, link))
        above *= ranks
    return _steps(counts)


def _tree_steps(levels: Levels) -> float:
    """The same of a sum up and down a tree."""
    return _steps(
        [(2 * min(ranks - 1, math.ceil(math.log2(ranks))), link) for ranks, link, _ in levels]
    )


def _steps(counts: Iterable[tuple[int, Link]]) -> float:
    """Seconds of so many steps on each link, of a collective that starts once."""
    starts = [link.latency - link.hop for _, link in counts if link.hop]
    return sum(n * (link.hop or link.latency) for n, link in counts) + max(starts, default=0.0)


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
