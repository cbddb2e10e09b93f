"""Refuse figures of a cluster that no machine can have, by their place in the file."""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.cluster.cluster import Cluster, Device, Link
from autopipe.errors import AutopipeError, PlanError


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
    check_number(path, sum(node.count * node.num_devices for node in cluster.nodes))
    for at, part in _parts(cluster, path):
        if isinstance(part, Device):
            _check_device(at, part)
        else:
            _check_link(at, part)
    if cluster.across is None and len({node.site for node in cluster.nodes}) > 1:
        raise AutopipeError(
            f"{path}.across: expected the link between sites, as nodes stand at several; found none"
        )


def check_units(cluster: Cluster) -> None:
    """Refuse figures that nothing has: TFLOP/s, GB, GB/s or us where a file has plain units.

    Raises:
        PlanError: the figure by its path.
    """
    for at, part in _parts(cluster, "cluster"):
        if isinstance(part, Device):
            for dtype, rate in part.flops.items():
                _fast(f"{at}.flops.{dtype}", rate)
            _fast(f"{at}.bandwidth", part.bandwidth)
            _fast(f"{at}.host", part.host)
            if part.memory < LEAST_MEMORY:
                raise PlanError(f"{at}.memory: expected at least 1e6 bytes, found {part.memory}")
            _soon(f"{at}.launch", part.launch)
        else:
            _soon(f"{at}.latency", part.latency)
            _soon(f"{at}.hop", part.hop)
            for name in ("bandwidth", "summing", "gathering"):
                _fast(f"{at}.{name}", getattr(part, name), LEAST_LINK)


def _parts(cluster: Cluster, path: str) -> Iterator[tuple[str, Device | Link]]:
    """A cluster's devices and links, each with its path, in the order of a file."""
    for i, node in enumerate(cluster.nodes):
        here = f"{path}.nodes[{i}]"
        for j, group in enumerate(node.groups):
            yield f"{here}.groups[{j}].device", group.device
        if node.within is not None:
            yield f"{here}.within", node.within
    for name in ("within", "between", "across"):
        link = getattr(cluster, name)
        if link is not None:
            yield f"{path}.{name}", link


MOST_DEVICES = 1_000_000
"""More devices than one site has. A plan for this number takes minutes, for more it takes hours."""


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
    _not_negative(f"{path}.host", device.host)
    _not_negative(f"{path}.launch", device.launch, LONGEST)
    _not_negative(f"{path}.half", device.half, LARGEST)
    for name, kernel in device.kernels.items():
        for way in ("forward", "backward"):
            pace = getattr(kernel, way)
            _not_negative(f"{path}.kernels.{name}.{way}.start", pace.start, LONGEST)
            _not_negative(f"{path}.kernels.{name}.{way}.rate", pace.rate)


def _check_link(path: str, link: Link) -> None:
    _not_negative(f"{path}.latency", link.latency, LONGEST)
    _positive(f"{path}.bandwidth", link.bandwidth)
    _not_negative(f"{path}.summing", link.summing)
    _not_negative(f"{path}.gathering", link.gathering)
    _not_negative(f"{path}.hop", link.hop, LONGEST)


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


LEAST_RATE, LEAST_MEMORY, SOON = 1e6, 1e6, 1.0
"""A second, bytes, seconds: figures of devices beyond these are in other units."""

LEAST_LINK = 1e5
"""Bytes a second: slower than any line between sites, and faster than what is written in GB/s."""


def _fast(place: str, rate: float, least: float = LEAST_RATE) -> None:
    """Refuse a rate that is too low; 0 stands for an unknown one."""
    if 0 < rate < least:
        text = f"{least:.0e}".replace("e+0", "e")
        raise PlanError(f"{place}: expected at least {text} a second, found {rate:g}")


def _soon(place: str, seconds: float) -> None:
    if seconds > SOON:
        raise PlanError(f"{place}: expected less than 1 s, found {seconds:g} s")
