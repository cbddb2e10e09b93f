"""The cluster that a row names: a preset device, and links as far as the row describes them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from autopipe.cluster import datasheets, efficiency, spec
from autopipe.cluster.cluster import Cluster, Device, Group, Kernel, Link, Pace
from autopipe.cluster.measured import ATTENTIONS
from benchmarks.published.rows import Unsupported

NVLINK = 25e9
"""Bytes a second of one link in one direction, of NVLink 2 to 4;
https://en.wikipedia.org/wiki/NVLink."""


RACK = 64
"""GPUs of GB200 and GB300 that NVLink joins: of the 72 of a rack (NVL72) as many as are a power of
two, as layouts have them."""

FLASH1 = 0.40, 0.30
"""Shares of a device's peak that FlashAttention 1 reaches, forward and backward: the middles of 30
to 50 % and of 25 to 35 % (Dao, FlashAttention-2, 2023, arXiv:2307.08691, section 1)."""


def kind_of(gpu: str, memory_gb: float | None) -> str:
    """The preset of a device by what sources call it: `A100-SXM4-80GB`, `H100-96GB-HBM2e (500W)`.

    Of those whose name begins alike the one of that memory is taken, else the smallest.

    Raises:
        Unsupported: there is none.
    """
    name = _plain(gpu)
    pcie = "pcie" in name
    found = []
    for kind, sheet in datasheets.DEVICES.items():
        family = _plain(re.sub(r"-(PCIe|\d+GB).*", "", kind))
        if re.match(rf"{family}(?!\d)", name) and pcie >= ("PCIe" in kind):
            size = memory_gb or float((re.search(r"(\d+)\s*gb", gpu.lower()) or [0, 0])[1])
            off = (
                abs(sheet.memory / efficiency.GIB - size) if size else sheet.memory / efficiency.GIB
            )
            found.append((-len(family), pcie != ("PCIe" in kind), off, kind))
    if not found:
        raise Unsupported(f"device {gpu or 'not named'}")
    return min(found)[-1]


def _plain(name: str) -> str:
    """A device's name in small letters, its parts joined by a dash, without its maker's words."""
    makers = "nvidia|geforce|tesla|quadro|rtx|dgx|hgx|amd|instinct"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(makers, "", name.lower())).strip("-")


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
    kind = kind_of(gpu, memory_gb)
    joined = max(per_node, min(RACK, devices)) if kind.startswith("GB") else per_node
    found = spec.parse(f"{-(-devices // joined)}x{joined}x{kind}")
    assert isinstance(found, Cluster)
    inside = found.within
    generation = re.search(r"nvlink\s*(\d)", within.lower())
    wire = datasheets.LINKS.get(f"NVLink {generation[1]}") if generation else None
    if wire:
        links = re.search(r"(\d+) links", within.lower())
        bandwidth = int(links[1]) * NVLINK if links else wire.bandwidth
        inside = spec.link_of(dataclasses.replace(wire, bandwidth=bandwidth))
    outside = found.between
    if rate := re.search(r"(?:(\d+)\s*x\s*)?([\d.]+)\s*gb(?:it)?/s", between.lower()):
        whole = float(rate[1] or 1) * float(rate[2]) * 1e9 / 8 * efficiency.LINK_SHARE
        each = whole if "per gpu" in between.lower() else whole / per_node
        outside = Link(outside.latency, each, hop=outside.hop)
    return dataclasses.replace(found, within=inside, between=outside)


def devices_changed(cluster: Cluster, change: Callable[[Device], Device]) -> Cluster:
    """The cluster with other devices in the place of its own."""

    def group(found: Group) -> Group:
        return dataclasses.replace(found, device=change(found.device))

    nodes = tuple(
        dataclasses.replace(node, groups=tuple(map(group, node.groups))) for node in cluster.nodes
    )
    return dataclasses.replace(cluster, nodes=nodes)


HOPPER = ("H100", "H200", "H800", "GH200")

ON_HOPPER = (335 / 989) / (225 / 312)
"""What is left on H100 of a share of A100's peak for kernels that know no Hopper: by FlashAttention
2, which reaches 335 TFLOP/s on the one and 225 on the other (Dao, 2023, section 4.1)."""


def with_early_kernels(device: Device) -> Device:
    """The device with the matmuls of CUDA 11, which are slower on Hopper: fitted to such runs."""
    if not device.kind.startswith(HOPPER):
        return device
    slower = efficiency.STEADY_NEWER / efficiency.STEADY
    flops = {dtype: rate * slower for dtype, rate in device.flops.items()}
    return dataclasses.replace(device, flops=flops)


def with_flash1(device: Device) -> Device:
    """The device with attention as fast as FlashAttention 1's."""
    peak, held = datasheets.DEVICES[device.kind].flops["bf16"], device.flops
    peak *= ON_HOPPER if device.kind.startswith(HOPPER) else 1
    # A kernel's pace is that of fp32, which 16 bits multiply by as much as a matmul's.
    paces = (
        Pace(2 * device.launch, share * peak * held["fp32"] / held["bf16"]) for share in FLASH1
    )
    kernel = Kernel(*paces)
    return dataclasses.replace(device, kernels=dict.fromkeys(ATTENTIONS, kernel))
