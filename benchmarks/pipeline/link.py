"""A slow network on one machine: a network namespace per rank, and a relay with delay and rate.

    rank 0                       parent                        rank 1
    own network namespace        Relay, a thread               own network namespace
    10.77.0.1 on link0 <==TUN==>   read, hold, write   <==TUN==> 10.77.0.2 on link0

A TUN device hands IP packets to whoever holds its file descriptor. Each rank makes a namespace and
a device of its own (`enter`), and passes the descriptor to its parent over a Unix socket, which
does not care for namespaces. The relay writes each packet to the device it is for, `delay` seconds
after its last bit has left the sender at `rate`. Sockets, TCP and gloo are the real ones.

Namespaces have no name and devices do not persist: the kernel takes both back with the last process
inside, however that ends. It takes root (or CAP_NET_ADMIN) and /dev/net/tun, but no kernel module
like sch_netem.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

DEVICE = "link0"
MTU = 9000
"""Jumbo frames, as on a cluster's network; bytes."""

PRIORITY = 20
"""Of the relay under SCHED_FIFO, above that of the ranks (`rank.PRIORITY`)."""

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_TUNSETIFF = 0x400454CA  # linux/if_tun.h
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


def address(rank: int) -> str:
    """The IPv4 address of a rank."""
    return f"10.77.0.{rank + 1}"


def available() -> bool:
    """Whether this process may make namespaces and TUN devices."""
    return os.geteuid() == 0 and os.access("/dev/net/tun", os.R_OK | os.W_OK)


def enter(path: str, rank: int, mtu: int = MTU) -> Mapping[str, str]:
    """Move this process into a network namespace that only the relay at `path` connects.

    Call it before anything starts a thread: a thread stays in the namespace it was started in.

    Returns:
        What to set in the environment so that torch.distributed uses the link.

    Raises:
        OSError: this process may not, or no relay listens at `path`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to_relay:
        to_relay.connect(path)
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"unshare(CLONE_NEWNET): {os.strerror(number)}")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        for words in (
            "link set lo up",
            f"addr add {address(rank)}/24 dev {DEVICE}",
            # The queue takes what a burst of TCP leaves; the relay is what limits the rate.
            f"link set dev {DEVICE} mtu {mtu} txqueuelen 10000 up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        # A step's pause must not send TCP back to its first, small window.
        Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
        socket.send_fds(to_relay, [bytes([rank])], [tun])
    return {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": DEVICE}


@dataclass
class _End:
    """One rank's device: packets it has sent that are still on their way, and when it can go on."""

    tun: int
    leaving: deque[tuple[float, int, bytes]] = field(default_factory=deque)  # (due, target, packet)
    free: float = 0.0


@contextmanager
def relay(delay: float, rate: float | None, *, fifo: bool = False) -> Iterator[str]:
    """Carry packets between ranks while the block runs.

    Args:
        delay: seconds from a rank to another.
        rate: bytes per second that leave a rank; None: as fast as this machine goes.
        fifo: run before everything else on this machine (SCHED_FIFO).

    Yields:
        The path for `enter`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="link-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening,
    ):
        path = str(Path(folder) / "relay")
        listening.bind(path)
        listening.listen()
        ends: dict[int, _End] = {}
        stop = threading.Event()
        thread = threading.Thread(
            target=_carry, args=(listening, ends, delay, rate, stop, fifo), name="relay"
        )
        thread.start()
        try:
            yield path
        finally:
            stop.set()
            thread.join()
            for end in ends.values():
                os.close(end.tun)


def _carry(
    listening: socket.socket,
    ends: dict[int, _End],
    delay: float,
    rate: float | None,
    stop: threading.Event,
    fifo: bool,
) -> None:
    if fifo:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))  # 0: this thread
    while not stop.is_set():
        due = min((end.leaving[0][0] for end in ends.values() if end.leaving), default=None)
        wait = 0.05 if due is None else max(0.0, due - time.monotonic())
        senders = {end.tun: end for end in ends.values()}
        ready, _, _ = select.select([listening.fileno(), *senders], [], [], min(wait, 0.05))
        for number in ready:
            if number in senders:
                _take(senders[number], delay, rate)
            else:
                _welcome(listening, ends)
        now = time.monotonic()
        for end in ends.values():
            while end.leaving and end.leaving[0][0] <= now:
                _, target, packet = end.leaving.popleft()
                if target in ends:
                    _write(ends[target].tun, packet)


def _welcome(listening: socket.socket, ends: dict[int, _End]) -> None:
    """A rank has come: take its device, which it sends when the device is ready."""
    connection, _ = listening.accept()
    with connection:
        name, tuns, _, _ = socket.recv_fds(connection, 1, 1)
    if tuns:  # none: the rank has died before
        ends[name[0]] = _End(tuns[0])


def _take(end: _End, delay: float, rate: float | None) -> None:
    """Put the packets that a rank has sent on their way, each after the one before."""
    for _ in range(64):  # then look at the others
        try:
            packet = os.read(end.tun, 65535)
        except OSError:  # nothing more, or the rank is gone
            return
        if packet[0] >> 4 != 4:  # IPv6 asks for routers; there are none
            continue
        end.free = max(end.free, time.monotonic()) + (len(packet) / rate if rate else 0.0)
        end.leaving.append((end.free + delay, packet[19] - 1, packet))


def _write(tun: int, packet: bytes) -> None:
    try:
        os.write(tun, packet)
    except OSError:  # the rank is gone; TCP tells the others
        return
