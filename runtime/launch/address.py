"""Names of hosts -> addresses, and the ports and network interfaces of this host.

A name that has no address is an error. This host is no substitute for it: every node would then
wait for the ranks of the other nodes at its own address.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from autopipe.errors import LaunchError

PAUSE = 1.0
"""Seconds between two tries to resolve a name."""


def resolve(
    name: str,
    patience: float = 0.0,
    say: Callable[[str], None] = lambda line: None,
    look_up: Callable[[str], str] | None = None,
) -> str:
    """The address of a host name.

    Args:
        name: a host name, or an address.
        patience: seconds for which to try again; a cluster may publish a pod's name after the pod
            has started.
        say: called once with a line, when the first try has failed and another one follows.
        look_up: returns the address of a name, or raises OSError if the system knows none.

    Raises:
        LaunchError: the name still has no address after `patience` seconds.
    """
    deadline = time.monotonic() + patience
    told = False
    while True:
        try:
            return (look_up or _look_up)(name)
        except OSError as error:
            if time.monotonic() >= deadline:
                after = f" after {patience:g} s" if patience else ""
                raise LaunchError(
                    f"the host name {name!r} has no address{after}: {error}",
                    hint="give the first node by a name or an address that every node can resolve",
                ) from error
            if not told:
                say(f"waiting up to {patience:g} s for the host name {name!r} to have an address")
                told = True
            time.sleep(PAUSE)


def _look_up(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except UnicodeError as error:  # an empty or overlong label
        raise OSError(str(error)) from error


def towards(address: str) -> str | None:
    """The network interface from which this host talks to `address`; None: none was found.

    To connect a datagram socket sends nothing, but makes the system choose the socket's address.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address_of(probe, name) == own:
                return name
    return None


def own_address(host: str) -> str:
    """The address of this host from which it talks to another one; sends nothing, as `towards`.

    Raises:
        OSError: the other one has no address, or no way leads there.
    """
    family, _, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface (netdevice(7))."""


def _address_of(probe: socket.socket, interface: str) -> str | None:
    """The IPv4 address of an interface of this host, if it has one."""
    try:
        import fcntl

        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except (ImportError, OSError):  # not on Linux; an interface without an address
        return None
    return socket.inet_ntoa(answer[20:24])


def check_interfaces(environ: Mapping[str, str]) -> None:
    """Refuse a GLOO_SOCKET_IFNAME that names no interface of this host.

    Raises:
        LaunchError: names those that there are.
    """
    here = [name for _, name in socket.if_nameindex()]
    asked = environ.get("GLOO_SOCKET_IFNAME", "")
    if asked and not {*asked.split(",")} <= {*here}:
        raise LaunchError(
            f"GLOO_SOCKET_IFNAME is {asked!r} in the environment, and this host has the interfaces "
            f"{', '.join(here)}",
            hint="export one of them, or none of them: another node may have others",
        )


@contextmanager
def listening(port: int) -> Iterator[None]:
    """Within, torch begins to listen on a port of this host.

    Raises:
        LaunchError: another process listens there.
    """
    try:
        yield
    except RuntimeError as error:  # torch's DistNetworkError
        if "EADDRINUSE" not in str(error):
            raise
        raise LaunchError(
            f"rank 0 cannot listen on port {port} of this host: another process does, of another "
            "run or a second rank 0 of this one",
            hint="export another MASTER_PORT on every node; torchrun takes --master-port",
        ) from error
