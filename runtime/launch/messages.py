"""Non-blocking messages between the guards of a run, and the loop that reads them.

The sidecars' own small network: neither torch nor the rest of autopipe is imported here.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

TURN = 0.25
"""Seconds that a turn of a loop waits at most for something to read."""

LONGEST = 1.0
"""Seconds by which one turn advances a loop's clock at most, however long it took."""

Message = dict[str, Any]


class Connection:
    """Messages over a connected socket, a line of JSON each; no method blocks.

    Args:
        limit: bytes that a message may have. The connection closes on a longer message, and on a
            line that is no JSON object.

    Attributes:
        open: whether more messages may come.
    """

    def __init__(self, sock: socket.socket, limit: int = 1 << 30) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.open = True
        self._limit = limit
        self._coming = b""
        self._going = b""

    def send(self, **message: Any) -> None:
        """Write a message; a later `flush` writes the bytes that the socket does not take now."""
        self._going += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write as many of the remaining bytes as the socket takes."""
        try:
            while self._going:
                self._going = self._going[self.socket.send(self._going) :]
        except BlockingIOError:
            pass
        except OSError:
            self._going = b""  # closed; `receive` finds out once it has read the last messages

    def receive(self) -> list[Message]:
        """The messages that have come since the last call; after the last ones `open` is False."""
        try:
            while self.open and len(self._coming) <= self._limit:
                part = self.socket.recv(1 << 16)
                self._coming += part
                self.open = bool(part)
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        *lines, self._coming = self._coming.split(b"\n")
        self.open &= len(self._coming) <= self._limit
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.open = False
                break
            messages.append(message)
        return messages


class Loop:
    """Calls a function for each file that has something to read, and keeps a clock in seconds.

    A turn advances the clock by `LONGEST` at most. A process that did not run for a minute (a
    suspended job, a machine that swaps) thus does not conclude that the others were silent.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self._selector = selectors.DefaultSelector()
        self._last = time.monotonic()

    def watch(self, file: socket.socket | int, call: Callable[[], None]) -> None:
        """Call `call` whenever there is something to read from `file`."""
        self._selector.register(file, selectors.EVENT_READ, call)

    def forget(self, file: socket.socket | int) -> None:
        """Stop to watch `file`."""
        self._selector.unregister(file)

    def turn(self) -> None:
        """Wait `TURN` seconds at most, and call the functions of files with something to read."""
        for key, _ in self._selector.select(TURN):
            if key.fd in self._selector.get_map():  # no earlier call has closed it
                key.data()
        now = time.monotonic()
        self.clock += min(now - self._last, LONGEST)
        self._last = now
