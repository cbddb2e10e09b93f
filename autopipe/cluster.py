"""The machine a plan is made for: nodes of devices, and the links that join them.

    2x8xA100-80GB     2 nodes of 8            rank order, (node, local):
    8xH100-80GB       1 node of 8
    A100-80GB         1 device                  node 0 [ 0  1  2 .. 7 ]  within: NVLink
    local:4           4 processes here                    |
    cluster.json      anything else             node 1 [ 8  9 10 .. 15]  between: InfiniBand

Rates are those that programs reach, not those that datasheets promise; `Device.source` says which
figures they come from. Links are given for a pair of devices, in one direction.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from autopipe import codec, presets
from autopipe.errors import AutopipeError


@dataclass(frozen=True)
class Link:
    """Seconds before the first byte arrives, and bytes a second in one direction after it."""

    latency: float
    bandwidth: float

    def seconds(self, size: int) -> float:
        """Seconds until `size` bytes have arrived: latency + size / bandwidth."""
        return self.latency + size / self.bandwidth

    def __str__(self) -> str:
        return f"{self.latency * 1e6:.3g} us, {self.bandwidth / 1e9:.3g} GB/s"


@dataclass(frozen=True)
class Device:
    """One device, or one process of several that share a CPU.

    Args:
        kind: its name, as in `A100-80GB`; ranks are bound to devices of this name.
        memory: bytes that tensors may take.
        flops: floating-point operations a second that a matmul reaches, by dtype (`fp32`, `bf16`).
        bandwidth: bytes a second that an elementwise op reads and writes.
        launch: seconds per op that the host needs at least.
        source: where the figures come from.
    """

    kind: str
    memory: int
    flops: dict[str, float]
    bandwidth: float
    launch: float
    source: str

    def __str__(self) -> str:
        rates = ", ".join(f"{dtype} {rate / 1e12:.3g}" for dtype, rate in self.flops.items())
        return (
            f"{self.kind}: {self.memory / 2**30:.1f} GiB, {self.bandwidth / 1e9:.4g} GB/s, "
            f"TFLOP/s {rates}, {self.launch * 1e6:.3g} us an op"
        )


@dataclass(frozen=True)
class Group:
    """`count` equal devices in a row."""

    count: int
    device: Device


@dataclass(frozen=True)
class Node:
    """`count` equal nodes in a row, each with the devices of `groups`."""

    count: int
    groups: tuple[Group, ...]

    @property
    def num_devices(self) -> int:
        """Devices of one of these nodes."""
        return sum(group.count for group in self.groups)


@dataclass(frozen=True)
class Cluster:
    """Nodes in rank order, the link `within` a node and the one `between` nodes."""

    name: str
    nodes: tuple[Node, ...]
    within: Link
    between: Link

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(self.devices_per_node)

    @property
    def devices_per_node(self) -> list[int]:
        """Devices of each node, one entry a node."""
        return [node.num_devices for node in self.nodes for _ in range(node.count)]

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each group: every kind there is, in rank order, repeats included."""
        return tuple(group.device for node in self.nodes for group in node.groups)

    @property
    def smallest_memory(self) -> int:
        """Bytes of the smallest device."""
        return min(device.memory for device in self.devices)

    @property
    def slowest_device(self) -> Device:
        """The device whose fastest dtype is the slowest; between equals, by memory bandwidth."""
        return min(self.devices, key=lambda device: (max(device.flops.values()), device.bandwidth))

    def device_at(self, index: int) -> tuple[int, int, Device]:
        """The device of rank `index`: (node, index within the node, device).

        Raises:
            AutopipeError: the cluster has no such device.
        """
        first, rest = 0, index
        for node in self.nodes:
            if 0 <= rest < node.count * node.num_devices:
                skipped, local = divmod(rest, node.num_devices)
                row = [group.device for group in node.groups for _ in range(group.count)]
                return first + skipped, local, row[local]
            first, rest = first + node.count, rest - node.count * node.num_devices
        raise AutopipeError(
            f"asked for device {index} of {self.name}, which has {self.num_devices}, counted from 0"
        )

    def __str__(self) -> str:
        kinds = "\n".join(f"  {device}" for device in dict.fromkeys(map(str, self.devices)))
        return (
            f"{self.name}: {_number(len(self.devices_per_node), 'node')}, "
            f"{_number(self.num_devices, 'device')}\n{kinds}\n"
            f"  within a node: {self.within}\n  between nodes: {self.between}"
        )


@dataclass(frozen=True)
class LocalSpec:
    """`processes` processes on this machine; a probe turns it into a `Cluster`."""

    processes: int


def parse(spec: str) -> Cluster | LocalSpec:
    """What a user means by `spec`; the module's picture lists the forms.

    Raises:
        AutopipeError: a device that no preset knows, a count below 1, a form not listed.
        PlanError: the file cannot be read; see `codec.load`.
    """
    if spec.endswith(".json"):
        cluster = codec.load(Cluster, Path(spec), root="cluster")
        check(cluster)
        return cluster
    if spec.startswith("local:"):
        return LocalSpec(_count(spec, spec.removeprefix("local:"), "processes"))
    form = re.fullmatch(r"(?:(-?\d+)x)?(?:(-?\d+)x)?(.+)", spec)
    if form is None:
        raise AutopipeError(f"no cluster is described by {spec!r}", hint=_FORMS)
    counts = [text for text in form.groups()[:2] if text is not None]
    devices = _count(spec, counts[-1], "devices in a node") if counts else 1
    nodes = _count(spec, counts[0], "nodes") if len(counts) == 2 else 1
    kind = _known_kind(spec, form[3])
    sheet = presets.DEVICES[kind]
    return Cluster(
        name=spec,
        nodes=(Node(nodes, (Group(devices, _device(kind, sheet)),)),),
        within=_link(presets.WIRES[sheet.within]),
        between=_link(presets.WIRES[sheet.between]),
    )


def check(cluster: Cluster, path: str = "cluster") -> None:
    """Refuse figures that no machine has; `path` is what errors call the cluster.

    Raises:
        AutopipeError: the figure by its path, `cluster.nodes[0].groups[0].device.memory: ...`.
    """
    _filled(f"{path}.nodes", cluster.nodes)
    for i, node in enumerate(cluster.nodes):
        here = f"{path}.nodes[{i}]"
        _positive(f"{here}.count", node.count)
        _filled(f"{here}.groups", node.groups)
        for j, group in enumerate(node.groups):
            _positive(f"{here}.groups[{j}].count", group.count)
            _check_device(f"{here}.groups[{j}].device", group.device)
    for name, link in (("within", cluster.within), ("between", cluster.between)):
        _not_negative(f"{path}.{name}.latency", link.latency)
        _positive(f"{path}.{name}.bandwidth", link.bandwidth)


_FORMS = (
    "2x8xA100-80GB (nodes x devices x kind), 8xH100-80GB, local:4 (processes on this machine) or "
    "a .json file"
)


def _count(spec: str, text: str, what: str) -> int:
    if not re.fullmatch(r"-?\d+", text):
        raise AutopipeError(f"{spec!r}: expected a number of {what}, found {text!r}", hint=_FORMS)
    if int(text) < 1:
        raise AutopipeError(f"{spec!r}: expected at least 1 for the {what}, found {text}")
    return int(text)


def _known_kind(spec: str, asked: str) -> str:
    by_lower = {kind.lower(): kind for kind in presets.DEVICES}
    asked_lower = asked.lower()
    if asked_lower in by_lower:
        return by_lower[asked_lower]

    def distance(kind: str) -> tuple[bool, float]:
        likeness = difflib.SequenceMatcher(None, asked_lower, kind).ratio()
        return not kind.startswith(asked_lower), -likeness

    close = [by_lower[kind] for kind in sorted(by_lower, key=distance)]
    raise AutopipeError(
        f"{spec!r}: no device {asked!r} is known",
        hint=f"known, the closest first: {', '.join(close)}; describe others in a .json file",
    )


def _device(kind: str, sheet: presets.Datasheet) -> Device:
    return Device(
        kind=kind,
        memory=int(sheet.memory) - presets.RESERVE,
        flops={dtype: peak * presets.MATMUL_SHARE for dtype, peak in sheet.flops.items()},
        bandwidth=sheet.bandwidth * presets.MEMORY_SHARE,
        launch=presets.LAUNCH,
        source=f"{presets.MATMUL_SHARE:.0%} of the peaks of {sheet.source}",
    )


def _link(wire: presets.Wire) -> Link:
    return Link(wire.latency, wire.bandwidth * presets.LINK_SHARE)


def _check_device(path: str, device: Device) -> None:
    _positive(f"{path}.memory", device.memory)
    _filled(f"{path}.flops", device.flops)
    for dtype, rate in device.flops.items():
        _positive(f"{path}.flops.{dtype}", rate)
    _positive(f"{path}.bandwidth", device.bandwidth)
    _not_negative(f"{path}.launch", device.launch)


def _filled(path: str, entries: tuple[object, ...] | dict[str, float]) -> None:
    if not entries:
        raise AutopipeError(f"{path}: expected at least one entry, found none")


def _positive(path: str, found: float) -> None:
    if not found > 0:
        raise AutopipeError(f"{path}: expected more than 0, found {found}")


def _not_negative(path: str, found: float) -> None:
    if not found >= 0:
        raise AutopipeError(f"{path}: expected at least 0, found {found}")


def _number(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
