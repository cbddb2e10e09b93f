"""The cluster that a row names: a preset device, and links as far as the row describes them."""

from __future__ import annotations

import dataclasses
import re
from functools import lru_cache

from autopipe.cluster import datasheets, efficiency, spec
from autopipe.cluster.cluster import Cluster, Device, Link
from autopipe.cluster.collective_time import Levels, Topology
from benchmarks.published.rows import Run, Unsupported

NEVER_FITTED = "B200"
"""Devices to whose rows no constant is fitted, so that there are some of a device never seen."""

NVLINK = 25e9
"""Bytes a second of one link in one direction, of NVLink 2 to 4;
https://en.wikipedia.org/wiki/NVLink."""


def kind_of(gpu: str, memory_gb: float | None) -> str:
    """The preset of a device by what sources call it: `A100-SXM4-80GB`, `H100-96GB-HBM2e (500W)`.

    Of those whose name begins alike the one of that memory is taken, else the smallest.

    Raises:
        Unsupported: there is none.
    """
    name = re.sub(r"[^a-z0-9]", "", gpu.lower().replace("nvidia", "").replace("geforce", ""))
    pcie = "pcie" in name
    found = []
    for kind, sheet in datasheets.DEVICES.items():
        family = re.sub(r"-(PCIe|\d+GB).*", "", kind)
        if name.startswith(family.lower()) and pcie >= ("PCIe" in kind):
            size = memory_gb or float((re.search(r"(\d+)\s*gb", gpu.lower()) or [0, 0])[1])
            off = (
                abs(sheet.memory / efficiency.GIB - size) if size else sheet.memory / efficiency.GIB
            )
            found.append((-len(family), pcie != ("PCIe" in kind), off, kind))
    if not found:
        raise Unsupported(f"device {gpu or 'not named'}")
    return min(found)[-1]


@lru_cache(maxsize=256)
def cluster_of(
    gpu: str, memory_gb: float | None, devices: int, per_node: int, within: str, between: str
) -> tuple[Cluster, Topology]:
    """Nodes of the device that `gpu` names, as many as hold all devices."""
    found = spec.parse(f"{-(-devices // per_node)}x{per_node}x{kind_of(gpu, memory_gb)}")
    assert isinstance(found, Cluster)
    inside = found.within
    generation = re.search(r"nvlink\s*(\d)", within.lower())
    wire = datasheets.LINKS.get(f"NVLink {generation[1]}") if generation else None
    if wire:
        links = re.search(r"(\d+) links", within.lower())
        bandwidth = int(links[1]) * NVLINK if links else wire.bandwidth
        inside = Link(wire.latency, bandwidth * efficiency.LINK_SHARE)
    outside = found.between
    if rate := re.search(r"(?:(\d+)\s*x\s*)?([\d.]+)\s*gb(?:it)?/s", between.lower()):
        whole = float(rate[1] or 1) * float(rate[2]) * 1e9 / 8 * efficiency.LINK_SHARE
        outside = Link(outside.latency, whole if "per gpu" in between.lower() else whole / per_node)
    cluster = dataclasses.replace(found, within=inside, between=outside)
    return cluster, Topology.of(cluster)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The device, and how the ranks of a run exchange.

    Rank = (pp * DP + dp) * TP + tp, as Megatron-LM and DeepSpeed have it.

    Args:
        device: with the rates that programs reach.
        capacity: bytes of its memory in all.
        tensor, data: the levels over which a tensor- and a data-parallel group sums.
        hop: the link to the next rank of the pipeline.
        newer: the device is H100's generation or a later one.
    """

    device: Device
    capacity: float
    tensor: Levels
    data: Levels
    hop: Link
    newer: bool


def machine_of(run: Run) -> Machine:
    """The machine of a run.

    Raises:
        Unsupported: its device is not known, or has not the dtype.
    """
    cluster, topology = cluster_of(
        run.gpu, run.memory_gb, run.devices, run.per_node, run.within, run.between
    )
    (group,) = cluster.nodes[0].groups
    beside = run.tp * run.dp
    return Machine(
        device=group.device,
        capacity=datasheets.DEVICES[group.device.kind].memory,
        tensor=topology.levels(range(run.tp)),
        data=topology.levels(range(0, beside, run.tp)),
        hop=topology.pair(0, beside).link if run.pp > 1 else cluster.within,
        newer=datasheets.DEVICES[group.device.kind].steady == efficiency.STEADY_NEWER,
    )
