"""Connects the ranks of one host by wires (`comm.cma`), and tries each wire out.

    rank 0                              rank 1
    listen, card  ---- all cards ----   listen, card        a card: a rank's host, pid and socket
    accept  <------- Unix socket -----  connect             the kernel tells which process calls
    look, leave a mark  <------------>  look, leave a mark  can each read and write the other?
    wires   --- all have worked -----   wires               otherwise no rank gets any wire

A container, a security module or another user can forbid copies between processes. No setting tells
whether they do, so each wire is tried.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch.distributed as dist

from autopipe.runtime.comm.cma import CALLS, CmaWire
from autopipe.schedules.transfers import Edge

PATIENCE = 20.0
"""Seconds for the other end of a wire to answer while the wire is made."""

_BACKLOG = 1024  # ranks that may connect before the first connection is accepted
_HELLO = struct.Struct("<2q")
_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h; Yama's own
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class Links(NamedTuple):
    """How a rank reaches its peers.

    Attributes:
        wires: a wire to each peer on the rank's host, by the peer's rank.
        far: the pipelines of the world that have a channel from host to host.
    """

    wires: dict[int, CmaWire]
    far: tuple[Sequence[int], ...]


def make_links(
    pipelines: Sequence[Sequence[int]],
    edges: Sequence[Edge],
    world: dist.ProcessGroup | None = None,
) -> Links | str:
    """Connect this rank to the ranks of its host with which it exchanges tensors.

    Every rank of the world calls it, with the same arguments, at the same point of its program.

    Args:
        pipelines: for each pipeline (a data-parallel coordinate) the global rank of each stage.
        edges: which stages send to which.
        world: all ranks, for tensors in host memory; None: the default group is.

    Returns:
        The links, on every rank; or, on every rank the same, the reason why there are none.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    card, listener = listen()
    cards = [card] * size
    dist.all_gather_object(cards, card, group=world)
    pairs = [{(stages[edge.source], stages[edge.target]) for edge in edges} for stages in pipelines]
    joined = {pair for found in pairs for pair in found if pair[0] != pair[1]}
    local = {pair for pair in joined if _share_host(cards, pair)}
    if joined and not local:
        if listener is not None:
            listener.close()
        return "no two ranks that exchange tensors share a host"
    peers = sorted({sum(pair) - rank for pair in local if rank in pair})
    wires, problem = {}, None
    try:
        wires = make_wires(rank, cards, peers, listener)
    except OSError as error:
        # A rank that gives up makes its peers give up: their errors are not the reason.
        echo = isinstance(error, ConnectionError | TimeoutError)
        problem = echo, f"rank {rank} cannot copy: {error}"
    problems = [problem] * size
    dist.all_gather_object(problems, problem, group=world)
    known = [found for found in problems if found is not None]
    if known:
        for wire in wires.values():
            wire.close()
        return min(known)[1]
    distant = (
        stages
        for stages, found in zip(pipelines, pairs, strict=True)
        if any(pair in joined - local for pair in found)
    )
    return Links(wires, tuple(distant))


def _share_host(cards: Sequence[Card], pair: tuple[int, int]) -> bool:
    return cards[pair[0]].shares_host(cards[pair[1]])


class Host(NamedTuple):
    """What identifies a host: two ranks may have a wire if their hosts are equal.

    Two network namespaces count as two hosts, although a copy would get through: a user who sets
    them up, as a benchmark of a slow link does, wants their network to be used.
    """

    boot: str
    pids: int
    network: int


def host() -> Host | None:
    """The host of this process; None: the system allows no wires."""
    if CALLS is None:
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return Host(boot, os.stat("/proc/self/ns/pid").st_ino, os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        return None


class Card(NamedTuple):
    """What a rank tells all others: its host, its process id, and the address of its socket."""

    host: Host | None
    pid: int
    address: bytes

    def shares_host(self, other: Card) -> bool:
        """Whether the two ranks may have a wire between them."""
        return self.host is not None and self.host == other.host


def listen() -> tuple[Card, socket.socket | None]:
    """This process's card, and the listening socket that the card names; None: there is none."""
    found = host()
    if found is None:
        return Card(None, 0, b""), None
    address = b"\0autopipe-" + secrets.token_hex(16).encode()  # abstract: it makes no file
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:  # a sandbox forbids it; the other ranks still wait for this rank's card
        listener.close()
        return Card(None, 0, b""), None
    return Card(found, os.getpid(), address), listener


def make_wires(
    rank: int, cards: Sequence[Card], peers: Sequence[int], listener: socket.socket | None
) -> dict[int, CmaWire]:
    """A wire to each of `peers`, tried in both directions; the peers call it at the same time.

    Args:
        rank: this process's rank.
        cards: the cards of all ranks.
        peers: ranks on this rank's host.
        listener: the socket that `listen` has made; this function closes it.

    Returns:
        The wires, by peer.

    Raises:
        OSError: a peer does not answer, or a copy is forbidden; all wires are closed then.
    """
    with ExitStack() as undo:
        if listener is not None:
            undo.callback(listener.close)
        ends = {}
        for peer in (peer for peer in peers if peer < rank):
            ends[peer] = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            ends[peer].settimeout(PATIENCE)
            ends[peer].connect(cards[peer].address)
        callers = {cards[peer].pid: peer for peer in peers if peer > rank}
        while callers:
            assert listener is not None, "a rank without a host has no peers"
            listener.settimeout(PATIENCE)
            end = listener.accept()[0]
            caller = callers.pop(_process_behind(end), None)
            if caller is None:  # no peer: any process may connect to an abstract socket
                end.close()
                continue
            ends[caller] = undo.enter_context(end)
            end.settimeout(PATIENCE)
        wires = {peer: CmaWire(peer, cards[peer].pid, end) for peer, end in ends.items()}
        _try(list(wires.values()))
        for end in ends.values():
            end.setblocking(False)
        undo.pop_all()
    if listener is not None:
        listener.close()
    return wires


def _process_behind(end: socket.socket) -> int:
    """The id of the process at the other end of a socket, as the kernel tells it."""
    found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", found)[0]
    return pid


def _try(wires: Sequence[CmaWire]) -> None:
    """Read a number from each peer's memory and write one there, as each peer does in this process.

    Raises:
        OSError: the copy to or from some peer fails.
    """
    # Where Yama lets only parents trace a process, the process may allow all others, as here.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    number = secrets.randbits(62)
    marks = [(ctypes.c_int64 * 2)() for _ in wires]  # a peer's number: read there, left here
    sent_numbers = [(ctypes.c_int64 * 1)(number) for _ in wires]
    size = ctypes.sizeof(ctypes.c_int64)
    for wire, sent_number, mark in zip(wires, sent_numbers, marks, strict=True):
        wire.end.sendall(_HELLO.pack(ctypes.addressof(sent_number), ctypes.addressof(mark) + size))
    for wire, sent_number, mark in zip(wires, sent_numbers, marks, strict=True):
        to_read, to_write = _HELLO.unpack(_exactly(wire, _HELLO.size))
        try:
            wire.read(ctypes.addressof(mark), to_read, size)
            wire.write(ctypes.addressof(sent_number), to_write, size)
        except OSError as error:
            where = f"{error.strerror}, between its memory and that of rank {wire.rank}"
            raise OSError(error.errno, where) from error
        wire.end.sendall(b"+")
    for wire, mark in zip(wires, marks, strict=True):
        _exactly(wire, 1)
        if mark[0] != mark[1]:
            raise OSError(errno.EFAULT, "what was read and what was written differ")


def _exactly(wire: CmaWire, size: int) -> bytes:
    found = wire.end.recv(size, socket.MSG_WAITALL)
    if len(found) < size:
        raise ConnectionAbortedError(errno.ECONNABORTED, "the other side has given up")
    return found
