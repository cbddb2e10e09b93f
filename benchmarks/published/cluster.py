"""The cluster that a row names: a preset device, and links as far as the row describes them."""

from __future__ import annotations

import dataclasses
import re

from autopipe.cluster import datasheets, efficiency, spec
from autopipe.cluster.cluster import Cluster, Link
from benchmarks.published.rows import Unsupported

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


def cluster_of(
    gpu: str, memory_gb: float | None, devices: int, per_node: int, within: str, between: str
) -> Cluster:
    """Nodes of the device that `gpu` names, as many as hold all devices.

    Args:
        memory_gb: of the device, where its name does not say it.
        within, between: links in a node and between nodes as a row has them (`NVLink3 (4 links)`,
            `4x100Gb/s`); the preset's where they say nothing.

    Raises:
        Unsupported: there is no such device.
    """
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
    return dataclasses.replace(found, within=inside, between=outside)
