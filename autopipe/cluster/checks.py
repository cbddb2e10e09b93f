"""Which figures of a cluster a machine can have; others are refused by their place in it."""

from __future__ import annotations

from autopipe.cluster.cluster import Cluster, Device, Link
from autopipe.errors import AutopipeError


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
        _check_link(f"{here}.within", node.within)
    check_number(path, sum(node.count * node.num_devices for node in cluster.nodes))
    for name in ("within", "between", "across"):
        _check_link(f"{path}.{name}", getattr(cluster, name))
    if cluster.across is None and len({node.site for node in cluster.nodes}) > 1:
        raise AutopipeError(
            f"{path}.across: expected the link between sites, as nodes stand at several; found none"
        )


MOST_DEVICES = 1_000_000
"""More than anyone has in one place. A plan for so many takes minutes, for more of them hours."""


def check_number(path: str, devices: int) -> None:
    """Refuse more devices than anyone has, before a list is made of them.

    Raises:
        AutopipeError: begins with `path`.
    """
    if devices > MOST_DEVICES:
        raise AutopipeError(
            f"{path}: expected at most {MOST_DEVICES:,} devices, found {devices:,}",
            hint="2x8xA100-80GB are 2 nodes of 8 devices",
        )


def _check_device(path: str, device: Device) -> None:
    _positive(f"{path}.memory", device.memory)
    _filled(f"{path}.flops", device.flops)
    for dtype, rate in device.flops.items():
        _positive(f"{path}.flops.{dtype}", rate)
    _positive(f"{path}.bandwidth", device.bandwidth)
    _not_negative(f"{path}.launch", device.launch, LONGEST)
    _not_negative(f"{path}.half", device.half, LARGEST)
    for name, kernel in device.kernels.items():
        for way in ("forward", "backward"):
            pace = getattr(kernel, way)
            _not_negative(f"{path}.kernels.{name}.{way}.start", pace.start, LONGEST)
            _not_negative(f"{path}.kernels.{name}.{way}.rate", pace.rate)


def _check_link(path: str, link: Link | None) -> None:
    if link is not None:
        _not_negative(f"{path}.latency", link.latency, LONGEST)
        _positive(f"{path}.bandwidth", link.bandwidth)
        _not_negative(f"{path}.summing", link.summing)
        _not_negative(f"{path}.gathering", link.gathering)


def _filled(path: str, entries: tuple[object, ...] | dict[str, float]) -> None:
    if not entries:
        raise AutopipeError(f"{path}: expected at least one entry, found none")


LEAST, MOST = 1e-9, 1e18
"""Bytes, or bytes or operations a second, between which any device's are by far. Beyond them sums
of costs lose their digits."""

LONGEST, LARGEST = 3600.0, 1e6
"""Seconds that nothing takes to start or to arrive, and a dim at which any matmul is fast."""


def _positive(path: str, found: float) -> None:
    if not found > 0:
        raise AutopipeError(f"{path}: expected more than 0, found {found}")
    if not LEAST <= found <= MOST:
        raise AutopipeError(f"{path}: expected {LEAST:g} to {MOST:g}, found {found:g}")


def _not_negative(path: str, found: float, most: float = MOST) -> None:
    if not found >= 0:
        raise AutopipeError(f"{path}: expected at least 0, found {found}")
    if found > most:
        raise AutopipeError(f"{path}: expected at most {most:g}, found {found:g}")
