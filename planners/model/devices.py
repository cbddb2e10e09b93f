"""The devices as a planner sees them: their kinds, and the groups that hold a stage each.

One pipeline stage is held by a *group* of dp devices that stand beside each other in rank order,
each of which stands for a tensor-parallel group of tp devices of the cluster
(`cluster.tp_groups`). Groups are numbered in the same order:

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

from autopipe.cluster.cluster import Cluster, Link
from autopipe.cluster.collective_time import Level, Levels, Topology, slowest
from autopipe.cluster.tp_groups import GroupKind, TpGroup, distinct, nominal


@dataclass(frozen=True)
class DeviceGroup:
    """Devices that hold one stage together.

    Args:
        kind: the number of the slowest kind among them.
        memory: bytes of the smallest.
        levels: the levels of links over which they sum gradients.
        host: bytes a second between the slowest of them and its host's memory; 0: no link.
    """

    kind: int
    memory: int
    levels: Levels
    host: float = 0.0


@dataclass(frozen=True, eq=False)
class Machine:
    """Devices in rank order.

    Args:
        kinds: for each device the number of its kind; higher numbers are slower.
        memory: bytes that each device may hold.
        topology: the nodes and sites of the devices.
        streams: the tensor-parallel degree: how many of the cluster's devices each one stands for.
        copying: bytes a second at which the slowest moves its own memory (`Cluster.copying`).
        means: for each device the numbers of the cluster's devices that it stands for.
        spare: how many of the cluster's devices are in no tensor-parallel group.
        within: for each kind the link within its tensor-parallel groups; empty: one device each.
        overlaps: whether ZeRO gathers and scatters while devices compute: NCCL does, in a stream of
            its own, a block ahead (as PyTorch FSDP, Zhao et al., VLDB 2023, section 3.3); over gloo
            it waits.
        hosts: for each kind the bytes a second to its host's memory (`Device.host`); empty: 0.
    """

    kinds: tuple[int, ...]
    memory: tuple[int, ...]
    topology: Topology
    streams: int = 1
    copying: float = math.inf
    means: tuple[tuple[int, ...], ...] = ()
    spare: int = 0
    overlaps: bool = False
    hosts: tuple[float, ...] = ()
    within: tuple[Link, ...] = ()

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.kinds)

    @property
    def existing(self) -> int:
        """The number of devices of the cluster."""
        return self.devices * self.streams + self.spare

    @cached_property
    def alike(self) -> bool:
        """Whether all devices are of one kind and hold equally much."""
        return len(set(zip(self.kinds, self.memory, strict=True))) == 1

    def groups(self, dp: int) -> tuple[DeviceGroup, ...]:
        """All groups of `dp` devices."""
        return _groups(self, dp)

    def levels(self, dp: int, group: int, groups: int) -> Levels:
        """The levels of links over which several consecutive groups sum gradients together."""
        return self.topology.levels(range(group * dp, (group + groups) * dp))

    def link(self, dp: int, group: int, other: int) -> Level:
        """The slowest of the links between the devices of two groups, one to one."""
        return _link(self, dp, group, other)


@lru_cache(maxsize=256)
def _groups(machine: Machine, dp: int) -> tuple[DeviceGroup, ...]:
    found = []
    for first in range(0, machine.devices - dp + 1, dp):
        own = slice(first, first + dp)
        levels = machine.topology.levels(range(first, first + dp))
        kinds = machine.kinds[own]
        host = min(machine.hosts[kind] for kind in kinds) if machine.hosts else 0.0
        found.append(DeviceGroup(max(kinds), min(machine.memory[own]), levels, host))
    return tuple(found)


@lru_cache(maxsize=4096)
def _link(machine: Machine, dp: int, group: int, other: int) -> Level:
    places = machine.topology
    first_group, second_group = (slice(first * dp, (first + 1) * dp) for first in (group, other))
    # Pairs in the same places are joined alike: of thousands of devices few are looked at.
    sites = zip(places.sites[first_group], places.sites[second_group], strict=True)
    nodes = zip(places.nodes[first_group], places.nodes[second_group], strict=True)
    distinct = {
        (site, node if node[0] == node[1] else None): d
        for d, (site, node) in enumerate(zip(sites, nodes, strict=True))
    }
    pairs = {places.pair(group * dp + d, other * dp + d) for d in distinct.values()}
    return slowest(pairs)


def machine_of(
    cluster: Cluster,
    tensor_groups: Sequence[TpGroup],
    limits: Sequence[int] | None = None,
    seconds: Callable[[GroupKind], Any] = lambda kind: nominal(kind.device),
) -> tuple[Machine, tuple[GroupKind, ...]]:
    """A cluster's machine, and the kinds of its tensor-parallel groups, the fastest first.

    Args:
        tensor_groups: the cluster's tensor-parallel groups; each becomes one device of the machine.
        limits: bytes that each of the cluster's devices may hold at most.
        seconds: gives a kind's seconds for the model, by which kinds are ordered. (An A100
            multiplies bf16 faster than an RTX 4090, and fp32 slower.)
    """
    kinds = distinct(tensor_groups)
    if len(kinds) > 1:
        kinds.sort(key=seconds)
    memory = [device.memory for device in cluster.row]
    if limits is not None:
        memory = [min(pair) for pair in zip(memory, limits, strict=True)]
    means = tuple(group.devices for group in tensor_groups)
    numbers = {id(group.kinds): max(map(kinds.index, group.kinds)) for group in tensor_groups}
    return Machine(
        kinds=tuple(numbers[id(group.kinds)] for group in tensor_groups),
        memory=tuple(min(memory[device] for device in devices) for devices in means),
        topology=Topology.of(cluster).at([first for first, *_ in means]),
        streams=len(means[0]),
        copying=cluster.copying,
        means=means,
        spare=len(memory) - sum(map(len, means)),
        overlaps=cluster.all_gpus,
        hosts=tuple(kind.device.host for kind in kinds),
        within=tuple(kind.link for kind in kinds if kind.link is not None),
    ), tuple(kinds)
