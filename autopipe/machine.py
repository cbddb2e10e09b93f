"""The devices that a planner deals out: what kinds there are, and in which groups they work.

One pipeline stage is held by a *group* of dp devices that stand beside each other in rank order,
each of which means tp devices in truth. Groups are numbered in rank order:

    device    0   1   2   3   4   5   6   7            kinds: A, B, C
              A   A   B   B   B   B   C   C
    dp=1      0   1   2   3   4   5   6   7            8 groups, of 3 classes
    dp=2      0-------1-------2-------3---             4 groups, of 3 classes
    dp=3      0-----------1-----------   -   -         2 groups; two devices are in none

A group is as fast as its slowest device and holds as much as its smallest. Groups of one class are
alike in both and are used in rank order; which class holds which stage is the planner's choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from autopipe.cluster import Cluster, Device
from autopipe.communication import Level, Levels, Topology, slowest


@dataclass(frozen=True)
class Group:
    """Devices that hold one stage together.

    Args:
        kind: the number of the slowest kind among them.
        memory: bytes of the smallest.
        levels: how they sum gradients.
    """

    kind: int
    memory: int
    levels: Levels


@dataclass(frozen=True, eq=False)
class Machine:
    """Devices in rank order.

    Args:
        kinds: of each device the number of its kind; higher ones are slower.
        memory: bytes that each may hold.
        topology: where they stand.
        streams: how many devices each of them means.
        copying: bytes a second at which the slowest moves its own memory (`Cluster.copying`).
    """

    kinds: tuple[int, ...]
    memory: tuple[int, ...]
    topology: Topology
    streams: int = 1
    copying: float = math.inf

    @property
    def devices(self) -> int:
        """How many there are."""
        return len(self.kinds)

    @cached_property
    def alike(self) -> bool:
        """Whether all are of one kind and hold as much."""
        return len(set(zip(self.kinds, self.memory, strict=True))) == 1

    def groups(self, dp: int) -> tuple[Group, ...]:
        """All groups of so many devices."""
        return _groups(self, dp)

    def link(self, dp: int, group: int, other: int) -> Level:
        """The slowest of the links between the devices of two groups, one to one."""
        return _link(self, dp, group, other)


@lru_cache(maxsize=256)
def _groups(machine: Machine, dp: int) -> tuple[Group, ...]:
    found = []
    for first in range(0, machine.devices - dp + 1, dp):
        own = slice(first, first + dp)
        levels = machine.topology.levels(range(first, first + dp))
        found.append(Group(max(machine.kinds[own]), min(machine.memory[own]), levels))
    return tuple(found)


@lru_cache(maxsize=4096)
def _link(machine: Machine, dp: int, group: int, other: int) -> Level:
    places = machine.topology
    own, theirs = (slice(first * dp, (first + 1) * dp) for first in (group, other))
    # Pairs in the same places are joined alike: of thousands of devices few are looked at.
    sites = zip(places.sites[own], places.sites[theirs], strict=True)
    nodes = zip(places.nodes[own], places.nodes[theirs], strict=True)
    alike = {
        (site, node if node[0] == node[1] else None): d
        for d, (site, node) in enumerate(zip(sites, nodes, strict=True))
    }
    pairs = {places.pair(group * dp + d, other * dp + d) for d in alike.values()}
    return slowest(pairs)


def machine_of(
    cluster: Cluster,
    tp: int = 1,
    limits: Sequence[int] | None = None,
    seconds: Callable[[Device], float] = lambda device: 1 / max(device.flops.values()),
) -> tuple[Machine, tuple[Device, ...]]:
    """A cluster's machine, and its kinds of devices, the fastest first.

    Args:
        tp: so many devices beside each other are one of the machine's.
        limits: bytes that each of the cluster's devices may hold at most.
        seconds: what a device takes for what is to be done; which of two is faster depends on it.
            (An A100 multiplies bf16 faster than an RTX 4090, and fp32 slower.)
    """
    kinds: list[Device] = []
    for device in cluster.devices:
        if device not in kinds:
            kinds.append(device)
    if len(kinds) > 1:
        kinds.sort(key=seconds)
    row = [
        group.device
        for node in cluster.nodes
        for _ in range(node.count)
        for group in node.groups
        for _ in range(group.count)
    ]
    number = {id(device): kinds.index(device) for device in cluster.devices}
    memory = [device.memory for device in row]
    if limits is not None:
        memory = [min(pair) for pair in zip(memory, limits, strict=True)]
    starts = range(0, len(row) - tp + 1, tp)
    return Machine(
        tuple(max(number[id(device)] for device in row[i : i + tp]) for i in starts),
        tuple(min(memory[i : i + tp]) for i in starts),
        Topology.of(cluster, tp),
        tp,
        cluster.copying,
    ), tuple(kinds)
