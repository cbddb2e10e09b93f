"""Groups a cluster's devices into tensor-parallel groups of tp devices, on one node where possible.

Tensor-parallel ranks communicate in every layer, so a group should stay on the fastest link: on one
node if a node has tp devices, else at one site, else anywhere. Devices that are left over on nodes
stay idle, or make groups over several nodes if more groups are wanted.

    node       0         1
    device     0  1  2   3  4  5
    tp=2       0--1      3--4          devices 2 and 5 are idle,
                     2---------5       or a group if three are wanted
    tp=4       0--1--2---3             no node has four; devices 4 and 5 are idle
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

from autopipe.cluster.cluster import Cluster, Device, Link
from autopipe.cluster.collective_time import Topology, a_message


class GroupKind(NamedTuple):
    """The device of a tensor-parallel group, and its ranks' link; None: they exchange nothing."""

    device: Device
    link: Link | None


class TpGroup(NamedTuple):
    """Devices by their numbers in the cluster, and their kinds, each once."""

    devices: tuple[int, ...]
    kinds: tuple[GroupKind, ...]


def tp_groups(cluster: Cluster, tp: int, wanted: int = 1) -> list[TpGroup]:
    """The groups of `tp` devices, the nearest first and of those in rank order.

    Args:
        wanted: the number of groups, if possible; there are never fewer than fit within nodes.
    """
    row = cluster.row
    if tp == 1:
        alone = {id(device): (GroupKind(device, None),) for device in row}
        return [TpGroup((number,), alone[id(device)]) for number, device in enumerate(row)]
    topology = Topology.of(cluster)
    grouped = _device_groups(topology, tp, wanted)
    levels = [topology.farthest(devices) for devices in grouped]
    # Groups from site to site share the wires of their sites.
    at = [{topology.sites[device] for device in devices} for devices in grouped]
    crossing = Counter(site for sites in at if len(sites) > 1 for site in sites)
    known: dict[Hashable, tuple[GroupKind, ...]] = {}  # clusters are large, and of few kinds
    found = []
    for devices, level, sites in zip(grouped, levels, at, strict=True):
        own = {id(row[device]): row[device] for device in devices}
        senders = max(crossing[site] for site in sites)
        key = *own, id(level.link), senders
        if key not in known:
            link = level.wire(senders) if level.shared else level.link
            known[key] = tuple(GroupKind(device, link) for device in own.values())
        found.append(TpGroup(devices, known[key]))
    return found


def _device_groups(topology: Topology, tp: int, wanted: int) -> list[tuple[int, ...]]:
    """The devices of each group: within nodes, then sites, then anywhere, until it is enough."""
    found: list[tuple[int, ...]] = []
    left: Iterable[int] = range(len(topology.nodes))
    for places in (topology.nodes, topology.sites, (0,) * len(topology.nodes)):
        rooms: dict[int, list[int]] = {}
        for device in left:
            rooms.setdefault(places[device], []).append(device)
        for room in rooms.values():
            found += [tuple(room[n : n + tp]) for n in range(0, len(room) - tp + 1, tp)]
        left = [device for room in rooms.values() for device in room[len(room) // tp * tp :]]
        if len(found) >= wanted:
            break
    return found


def nominal(device: Device) -> tuple[float, float]:
    """Seconds of an operation in the dtype that the device is fastest in, and of moving a byte."""
    return 1 / max(device.flops.values()), 1 / device.bandwidth


def slowest_kind(of: Iterable[TpGroup], seconds: Callable[[Device], Any] = nominal) -> GroupKind:
    """The slowest device, and the link with the slowest message; they need not be of one group.

    Args:
        seconds: gives a device's seconds for the work.
    """
    kinds = distinct(of)
    device = kinds[0].device
    if any(kind.device is not device for kind in kinds):  # seconds may take some to tell
        device = max((kind.device for kind in kinds), key=seconds)
    links = [kind.link for kind in kinds if kind.link is not None]
    return GroupKind(device, max(links, key=a_message, default=None))


def distinct(of: Iterable[TpGroup]) -> list[GroupKind]:
    """The kinds there are, each once."""
    found: list[GroupKind] = []
    for kinds in {id(group.kinds): group.kinds for group in of}.values():
        found += [kind for kind in kinds if kind not in found]
    return found
