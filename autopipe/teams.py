"""Teams: devices beside each other, each of which holds its part of every tensor.

A team stands on one node where a node has so many devices, else at one site where a site has, else
anywhere: nothing is sent as often as what its ranks send each other. What is left over is idle.

    node       0         1
    device     0  1  2   3  4
    tp=2       0--1      3--4       device 2 is in no team
    tp=4       0--1--2---3          no node has four; device 4 is in none
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate, groupby
from typing import NamedTuple

from autopipe.cluster import Cluster, Device, Link
from autopipe.communication import Topology, a_message


class Kind(NamedTuple):
    """What a team computes on, and what its ranks exchange over; None: they exchange nothing."""

    device: Device
    link: Link | None


class Team(NamedTuple):
    """Devices beside each other from the cluster's device `first` on.

    `kinds` are those of its devices, each once.
    """

    first: int
    kinds: tuple[Kind, ...]


def teams(cluster: Cluster, tp: int) -> list[Team]:
    """All teams of `tp` devices, in rank order; none if there are not so many devices."""
    devices = cluster.row
    if tp == 1:
        alone = {id(device): (Kind(device, None),) for device in devices}
        return [Team(first, alone[id(device)]) for first, device in enumerate(devices)]
    topology = Topology.of(cluster)
    starts = _starts(topology, tp)
    levels = [topology.farthest(range(first, first + tp)) for first in starts]
    crossing = sum(level.shared for level in levels)  # from site to site, over one wire
    known: dict[Hashable, tuple[Kind, ...]] = {}  # clusters are large, and of few kinds
    found = []
    for first, level in zip(starts, levels, strict=True):
        own = {id(device): device for device in devices[first : first + tp]}
        key = *own, id(level.link)
        if key not in known:
            link = level.wire(crossing) if level.shared else level.link
            known[key] = tuple(Kind(device, link) for device in own.values())
        found.append(Team(first, known[key]))
    return found


def _starts(topology: Topology, tp: int) -> list[int]:
    for places in (topology.nodes, topology.sites, (0,) * len(topology.nodes)):
        sizes = [len([*together]) for _, together in groupby(places)]
        if max(sizes) >= tp:
            ends = [*accumulate(sizes)]
            rooms = [range(end - size, end, tp) for end, size in zip(ends, sizes, strict=True)]
            return [first for room in rooms for first in room if first + tp <= room.stop]
    return []


def an_operation(device: Device) -> float:
    """Seconds of one operation in the dtype that the device is fastest in."""
    return 1 / max(device.flops.values())


def slowest(of: Iterable[Team], seconds: Callable[[Device], float] = an_operation) -> Kind:
    """The device that takes longest of all, and the link over which a message does.

    Args:
        seconds: that a device takes for what is to be done.
    """
    kinds = distinct(of)
    device = kinds[0].device
    if any(kind.device is not device for kind in kinds):  # seconds may take some to tell
        device = max((kind.device for kind in kinds), key=seconds)
    links = [kind.link for kind in kinds if kind.link is not None]
    return Kind(device, max(links, key=a_message, default=None))


def distinct(of: Iterable[Team]) -> list[Kind]:
    """The kinds there are, each once, in rank order."""
    found: list[Kind] = []
    for kinds in {id(team.kinds): team.kinds for team in of}.values():
        found += [kind for kind in kinds if kind not in found]
    return found
