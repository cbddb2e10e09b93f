"""A wire between two processes of one host: short messages, and copies between their memories.

Messages, here *words*, go through a Unix socket. `process_vm_writev` copies the bytes of a tensor
from one address space into the other, once, without a buffer and without a thread ("cross memory
attach", as MPI libraries do within a node). Linux allows it to a process that may trace the other
one: both run as one user in one pid namespace, and no container forbids the system call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

Word = tuple[int, int, int, int, int]
"""A message of five 64-bit numbers: kind, ticket, place, address, size (`cma_transport`)."""

_WORD = struct.Struct("<5q")
_EARFUL = 100 * _WORD.size  # bytes to ask the socket for


class _IoVec(ctypes.Structure):
    """`struct iovec`: a piece of memory."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


_Copy = Callable[[int, Any, int, Any, int, int], int]


def _system_calls() -> tuple[_Copy, _Copy] | None:
    """process_vm_readv and process_vm_writev; None: this system has no such calls."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        calls = libc.process_vm_readv, libc.process_vm_writev
    except AttributeError:
        return None
    pieces = ctypes.POINTER(_IoVec), ctypes.c_ulong
    for call in calls:
        call.argtypes = (ctypes.c_int, *pieces, *pieces, ctypes.c_ulong)
        call.restype = ctypes.c_ssize_t
    return calls


CALLS = _system_calls()
"""process_vm_readv and process_vm_writev, if this system has them."""


class CmaWire:
    """One end of a wire; no method waits.

    Args:
        rank, pid: the rank and the process id at the other end.
        end: this end of the socket.

    Attributes:
        closed: whether the other end is gone, and all its words have been read.
        backlog: words that the socket had no room for; `flush` sends them.
    """

    def __init__(self, rank: int, pid: int, end: socket.socket) -> None:
        self.rank = rank
        self.end = end
        self.closed = False
        self.backlog = bytearray()
        self._pid = pid
        self._broken = b""  # the first part of a word
        self._here, self._there = _IoVec(), _IoVec()
        self._pieces = ctypes.pointer(self._here), ctypes.pointer(self._there)
        assert CALLS is not None, "a host has them"
        self._reads, self._writes = CALLS

    def tell(self, kind: int, ticket: int, place: int, address: int, size: int) -> None:
        """Send a word, now or by a later `flush`; nothing is sent if the other end is gone."""
        if self.closed:
            return
        word = _WORD.pack(kind, ticket, place, address, size)
        sent = 0 if self.backlog else self._send(word)
        if sent < len(word):
            self.backlog += word[sent:]

    def flush(self) -> None:
        """Send as much of the backlog as the socket has room for."""
        del self.backlog[: self._send(self.backlog)]

    def _send(self, words: bytes | bytearray) -> int:
        try:
            return self.end.send(words)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            return len(words)  # the other end is gone; `hear` finds out after its last words

    def hear(self) -> Iterator[Word]:
        """Read words that have come; of many words it may leave some for the next call."""
        try:
            data = self.end.recv(_EARFUL)
        except BlockingIOError:
            return iter(())
        except ConnectionResetError:
            data = b""
        if not data:
            self.give_up()
        if self._broken or len(data) % _WORD.size:
            data = self._broken + data
            complete = len(data) - len(data) % _WORD.size
            data, self._broken = data[:complete], data[complete:]
        return _WORD.iter_unpack(data)

    def read(self, here: int, there: int, size: int) -> None:
        """Copy `size` bytes at the address `there` of the other process to `here`.

        Raises:
            OSError: ESRCH, the other process is gone; EFAULT, it has no such memory; EPERM, the
                system forbids the copy.
        """
        self._copy(self._reads, here, there, size)

    def write(self, here: int, there: int, size: int) -> None:
        """Copy `size` bytes at `here` to the address `there` of the other process.

        Raises:
            OSError: as `read`.
        """
        self._copy(self._writes, here, there, size)

    def _copy(self, call: _Copy, here: int, there: int, size: int) -> None:
        while True:
            self._here.base, self._here.size = here, size
            self._there.base, self._there.size = there, size
            done = call(self._pid, self._pieces[0], 1, self._pieces[1], 1, 0)
            if done == size:
                return
            if done <= 0:  # a call copies 2 GiB at most, but never nothing
                number = ctypes.get_errno() if done < 0 else errno.EFAULT
                raise OSError(number, os.strerror(number))
            here, there, size = here + done, there + done, size - done

    def give_up(self) -> None:
        """Treat the other end as gone."""
        self.closed = True
        self.backlog.clear()

    def close(self) -> None:
        """Close the socket; the other end notices."""
        self.closed = True
        self.end.close()
