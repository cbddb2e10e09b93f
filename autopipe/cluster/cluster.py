"""The machine a plan is made for: nodes of devices, and the links that join them.

    2x8xA100-80GB                    2 nodes of 8          rank order, (node, local):
    8xH100-80GB                      1 node of 8
    A100-80GB                        1 device                node 0 [ 0  1  2 .. 7 ]  within
    2xA100-80GB+4xA100-40GB          a node of each                    |  between
    4x1x2xA100-80GB@30ms,1Gbit/s     4 sites, far apart      node 1 [ 8  9 10 .. 15]
    local:4, cpu:4                   4 processes here                  :  across
    cluster.json                     anything else           node 2 [16 17 18 .. 23]  another site

Rates are those that programs reach, not those that datasheets promise; `Device.source` says which
figures they come from. Links are given for a pair of devices, in one direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from autopipe.errors import AutopipeError


@dataclass(frozen=True)
class Link:
    """Seconds before the first byte arrives, and bytes a second in one direction after it.

    Args:
        summing: bytes a second on the wire of an all-reduce, where that is not as fast as a
            message; 0: it is.
        gathering: the same of a reduce-scatter or an all-gather. With gloo they copy so much that
            they reach a third of what a message does.
        hop: seconds that each step of a collective after its first one takes more; 0: as long as a
            message's latency. NCCL starts once, and its later steps are quicker than a message.
    """

    latency: float
    bandwidth: float
    summing: float = 0.0
    gathering: float = 0.0
    hop: float = 0.0

    def seconds(self, size: int) -> float:
        """Seconds until `size` bytes have arrived: latency + size / bandwidth."""
        return self.latency + size / self.bandwidth

    def steps(self, count: int) -> float:
        """Seconds without a byte of `count` steps of a collective, one after the other."""
        return self.latency + (count - 1) * (self.hop or self.latency) if count else 0.0

    @property
    def sums(self) -> float:
        """Bytes a second on the wire of an all-reduce."""
        return self.summing or self.bandwidth

    @property
    def gathers(self) -> float:
        """Bytes a second on the wire of a reduce-scatter or an all-gather."""
        return self.gathering or self.bandwidth

    def __str__(self) -> str:
        waits = self.latency
        latency = f"{waits * 1e3:.3g} ms" if waits >= 1e-3 else f"{waits * 1e6:.3g} us"
        return f"{latency}, {self.bandwidth / 1e9:.3g} GB/s"


@dataclass(frozen=True)
class Pace:
    """How fast an op runs: `start` seconds, and then `rate` operations a second.

    Operations are counted as `ir.op_costs` counts them: an op without a rule does one for each
    element. A rate of 0 is that of matmuls.
    """

    start: float
    rate: float = 0.0


@dataclass(frozen=True)
class Kernel:
    """The paces of one op, forward and backward, in fp32."""

    forward: Pace
    backward: Pace


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
        half: a dim of so much halves the rate of a matmul: of (m, k) @ (k, n) it reaches
            m / (m + half) * k / (k + half) * n / (n + half) of `flops` (`ir.op_costs`).
        kernels: ops by name that are neither as fast as their bytes nor as a matmul; on a CPU a
            tanh computes for longer than it reads.
        rough: figures that are only roughly so, each with the reason.
        host: bytes a second between its memory and that of its host, in one direction, while it
            computes; 0: unknown, or the two memories are the same.
    """

    kind: str
    memory: int
    flops: dict[str, float]
    bandwidth: float
    launch: float
    source: str
    half: float = 0.0
    kernels: dict[str, Kernel] = field(default_factory=dict)
    rough: tuple[str, ...] = ()
    host: float = 0.0

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU: each is, except one that was measured as a CPU."""
        return self.kind != "cpu"

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
class NodeGroup:
    """`count` equal nodes in a row, each with the devices of `groups`.

    Args:
        site: the number of the place they stand at.
        within: the link between their devices, if it differs from the cluster's.
    """

    count: int
    groups: tuple[Group, ...]
    site: int = 0
    within: Link | None = None

    @property
    def num_devices(self) -> int:
        """Devices of one of these nodes."""
        return sum(group.count for group in self.groups)


@dataclass(frozen=True)
class Cluster:
    """Nodes in rank order, and the links that join devices, by level.

    Args:
        within: two devices of a node.
        between: two devices of different nodes at one site; each pair has its own.
        across: two sites. All that a site's devices send at once shares it.
    """

    name: str
    nodes: tuple[NodeGroup, ...]
    within: Link
    between: Link
    across: Link | None = None

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
    def has_gpus(self) -> bool:
        """Whether some device is a GPU."""
        return any(device.is_gpu for device in self.devices)

    @property
    def all_gpus(self) -> bool:
        """Whether every device is a GPU."""
        return all(device.is_gpu for device in self.devices)

    @property
    def row(self) -> list[Device]:
        """The device of each rank."""
        return [
            group.device
            for node in self.nodes
            for _ in range(node.count)
            for group in node.groups
            for _ in range(group.count)
        ]

    def link_of(self, node: NodeGroup) -> Link:
        """The link between the devices of a node."""
        return node.within or self.within

    @property
    def copying(self) -> float:
        """Bytes a second at which the slowest device in this moves its own memory."""
        return min(device.bandwidth for device in self.devices)

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
        links = [f"within a node: {link}" for link in dict.fromkeys(map(self.link_of, self.nodes))]
        links.append(f"between nodes: {self.between}")
        if self.across is not None:
            links.append(f"between sites: {self.across}, shared by all that a site sends")
        return (
            f"{self.name}: {_number(len(self.devices_per_node), 'node')}, "
            f"{_number(self.num_devices, 'device')}\n{kinds}\n"
            + "\n".join(f"  {line}" for line in links)
        )


def left_of(cluster: Cluster, nodes: Sequence[int]) -> Cluster:
    """The rest of a cluster, if the remaining nodes have these numbers of devices.

    Each remaining node is matched with the first unmatched node of the cluster that has as many
    devices; if there is none, it gets the cluster's first devices, or more of its last one.
    """
    row = [node for node in cluster.nodes for _ in range(node.count)]
    found = []
    for count in nodes:
        like = next((node for node in row if node.num_devices >= count), row[0] if row else None)
        if like in row:
            row.remove(like)
        node = like or cluster.nodes[-1]
        devices = [group.device for group in node.groups for _ in range(group.count)]
        devices += devices[-1:] * (count - len(devices))
        groups = tuple(Group(len([*same]), device) for device, same in groupby(devices[:count]))
        found.append(NodeGroup(1, groups, node.site, node.within))
    kinds = " + ".join(dict.fromkeys(device.kind for node in found for device in _of(node)))
    name = f"{sum(nodes)} x {kinds}, left of {cluster.name}"
    return replace(cluster, name=name, nodes=tuple(found))


def _of(node: NodeGroup) -> list[Device]:
    return [group.device for group in node.groups]


def _number(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
