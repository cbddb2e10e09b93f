"""The devices that a planner deals out: what kinds there are, and in which groups they work.

One pipeline stage is held by a *group* of dp devices that stand beside each other in rank order,
each of which is a team of tp devices in truth (`autopipe.teams`). Groups are numbered in the same
order:

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
from typing import Any

from autopipe.cluster import Cluster
from autopipe.communication import Level, Levels, Topology, slowest
from autopipe.teams import Kind, Team, distinct, nominal


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
        means: of each the cluster's devices that it means.
        spare: how many of the cluster's devices none of them means.
    """

    kinds: tuple[int, ...]
    memory: tuple[int, ...]
    topology: Topology
    streams: int = 1
    copying: float = math.inf
    means: tuple[tuple[int, ...], ...] = ()
    spare: int = 0

    @property
    def devices(self) -> int:
        """How many there are."""
        return len(self.kinds)

    @property
    def existing(self) -> int:
        """How many devices the cluster has."""
        return self.devices * self.streams + self.spare

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
    dealt: Sequence[Team],
    limits: Sequence[int] | None = None,
    seconds: Callable[[Kind], Any] = lambda kind: nominal(kind.device),
) -> tuple[Machine, tuple[Kind, ...]]:
    """A cluster's machine, and the kinds of its teams, the fastest first.

    Args:
        dealt: the cluster's devices in teams, each of which is one of the machine's.
        limits: bytes that each of the cluster's devices may hold at most.
        seconds: what a kind takes for what is to be done; which of two is faster depends on it.
            (An A100 multiplies bf16 faster than an RTX 4090, and fp32 slower.)
    """
    kinds = distinct(dealt)
    if len(kinds) > 1:
        kinds.sort(key=seconds)
    memory = [device.memory for device in cluster.row]
    if limits is not None:
        memory = [min(pair) for pair in zip(memory, limits, strict=True)]
    means = tuple(team.devices for team in dealt)
    numbers = {id(team.kinds): max(map(kinds.index, team.kinds)) for team in dealt}
    return Machine(
        tuple(numbers[id(team.kinds)] for team in dealt),
        tuple(min(memory[device] for device in devices) for devices in means),
        Topology.of(cluster).at([first for first, *_ in means]),
        len(means[0]),
        cluster.copying,
        means,
        len(memory) - sum(map(len, means)),
    ), tuple(kinds)
