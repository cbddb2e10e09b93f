"""Two nodes on one host, far apart: network namespaces joined by a link that waits.

    with two_nodes(latency=0.005) as run:
        process = run(0, "bash", "train.sh", "0", folder=folder)

    node 0: 10.77.0.1, link0 --- this process holds each packet back --- link0, 10.77.0.2: node 1

The kernel's own delay (netem) is in few kernels of container hosts; so each end is a TUN device
whose packets a thread here carries to the other one. It needs root, `ip` and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.shell import start

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "link0"
"""Of both nodes: each has its own."""

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h

Run = Callable[..., "subprocess.Popen[str]"]


def why_not() -> str | None:
    """Why there can be no such nodes here; None: there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces are Linux's, and root's to make"
    if shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        return "no `ip`, or no /dev/net/tun"
    tried = subprocess.run(["ip", "netns", "add", "autopipe-try"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", "autopipe-try"], capture_output=True)
    return tried.stderr.strip() or None


@contextmanager
def two_nodes(latency: float) -> Iterator[Run]:
    """Make both nodes; a packet takes `latency` seconds from one to the other."""
    spaces = [f"autopipe-{os.getpid()}-{node}" for node in (0, 1)]
    ends: list[int] = []
    stop = threading.Event()
    carrier = threading.Thread(target=_carry, args=(ends, latency, stop))
    try:
        for node, space in enumerate(spaces):
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            ends.append(_end_of_link(space, ADDRESSES[node], ADDRESSES[1 - node]))
        carrier.start()

        def run(node: int, *command: str, folder: Path) -> subprocess.Popen[str]:
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            inside = ("ip", "netns", "exec", spaces[node], *command)
            return start(*inside, folder=folder, environ={"PATH": path})

        yield run
    finally:
        stop.set()
        if carrier.is_alive():
            carrier.join()
        for end in ends:
            os.close(end)
        for space in spaces:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", space)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _end_of_link(space: str, own: str, other: str) -> int:
    """A TUN device in a namespace; what is sent through it is read from the file."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = f"ap{os.getpid() % 10**8}{own[-1]}"
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    _ip("link", "set", name, "netns", space, "name", INTERFACE)
    _ip("-n", space, "addr", "add", own, "peer", other, "dev", INTERFACE)
    _ip("-n", space, "link", "set", INTERFACE, "mtu", "60000", "txqueuelen", "2000", "up")
    return end


def _carry(ends: list[int], latency: float, stop: threading.Event) -> None:
    """Carry packets from each end to the other, each so much later."""
    waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    while not stop.is_set():
        due = min((queue[0][0] for queue in waiting if queue), default=time.monotonic() + 0.1)
        ready, _, _ = select.select(ends, [], [], max(0.0, due - time.monotonic()))
        for end in ready:
            with suppress(BlockingIOError):
                for _ in range(64):
                    packet = os.read(end, 65535)
                    queue = waiting[1 - ends.index(end)]
                    queue.append((time.monotonic() + latency, packet))
        now = time.monotonic()
        for end, queue in zip(ends, waiting, strict=True):
            while queue and queue[0][0] <= now:
                with suppress(OSError):  # a full queue drops it, as a router does
                    os.write(end, queue.popleft()[1])
