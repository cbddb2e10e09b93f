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
"""Seconds that a loop waits at most before it looks at its clock again."""

LONGEST = 1.0
"""Seconds that one turn of a loop counts for, however long it took."""

Message = dict[str, Any]


class Connection:
    """Messages over a connected socket, a line of JSON each; nothing here blocks.

    Args:
        limit: bytes that a message may have. A longer one, or one that is no JSON, closes it.
    """

    def __init__(self, sock: socket.socket, limit: int = 1 << 30) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.open = True
        self._limit = limit
        self._coming = b""
        self._going = b""

    def send(self, **message: Any) -> None:
        """Write a message; what the socket does not take at once goes with a later `flush`."""
        self._going += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what is left, as far as the socket takes it."""
        try:
            while self._going:
                self._going = self._going[self.socket.send(self._going) :]
        except BlockingIOError:
            pass
        except OSError:
            self._going = b""  # closed, as `receive` tells after what there is still to read

    def receive(self) -> list[Message]:
        """All messages that have come; `open` is False once there will be no more."""
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
    """Calls whoever has something to read, and counts the seconds turn by turn.

    A turn counts for a second at most: a process that was not run for a minute (a suspended job, a
    machine that swaps) does not find that everybody else was silent for so long.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self._selector = selectors.DefaultSelector()
        self._last = time.monotonic()

    def watch(self, file: socket.socket | int, call: Callable[[], None]) -> None:
        """Call `call` whenever there is something to read from `file`."""
        self._selector.register(file, selectors.EVENT_READ, call)

    def forget(self, file: socket.socket | int) -> None:
        """Call nobody for `file` any longer."""
        self._selector.unregister(file)

    def turn(self) -> None:
        """Wait for something to read, `TURN` seconds at most, and call who is to be called."""
        for key, _ in self._selector.select(TURN):
            if key.fd in self._selector.get_map():  # nobody called before has closed it
                key.data()
        now = time.monotonic()
        self.clock += min(now - self._last, LONGEST)
        self._last = now
