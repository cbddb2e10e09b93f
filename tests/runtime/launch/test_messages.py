"""Messages come whole and in order, and a sender of anything else is ignored."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from autopipe.runtime.launch.messages import LONGEST, Connection, Loop


@pytest.fixture(autouse=True)
def closes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test need not close its sockets."""
    real, made = socket.socketpair, contextlib.ExitStack()

    def socketpair() -> tuple[socket.socket, socket.socket]:
        one, two = real()
        return made.enter_context(one), made.enter_context(two)

    monkeypatch.setattr(socket, "socketpair", socketpair)
    with made:
        yield


@pytest.fixture
def pair() -> tuple[Connection, socket.socket]:
    """A wire, and the bare socket at its other end."""
    one, two = socket.socketpair()
    return Connection(one, limit=1000), two


def test_messages(pair: tuple[Connection, socket.socket]) -> None:
    wire, other = pair
    assert wire.receive() == [] and wire.open
    other.sendall(b'{"a": 1}\n{"b"')
    assert wire.receive() == [{"a": 1}]
    other.sendall(b": 2}\n")
    assert wire.receive() == [{"b": 2}] and wire.open
    wire.send(c=[3, "x"])
    assert other.recv(100) == b'{"c": [3, "x"]}\n'


def test_what_came_before_the_end_is_read(pair: tuple[Connection, socket.socket]) -> None:
    wire, other = pair
    other.sendall(b'{"a": 1}\n{"half')
    other.close()
    assert wire.receive() == [{"a": 1}] and not wire.open
    wire.send(b=2)  # to nobody


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.0\r\n", b"[1, 2]\n", b"\xff\n", 2000 * b"x"])
def test_noise_closes_the_connection(noise: bytes, pair: tuple[Connection, socket.socket]) -> None:
    wire, other = pair
    other.sendall(b'{"a": 1}\n' + noise)
    assert wire.receive() == [{"a": 1}] and not wire.open


def test_what_does_not_go_at_once_goes_later() -> None:
    one, two = map(Connection, socket.socketpair())
    one.send(long=10**6 * "x")
    received = []
    while not received:
        received = two.receive()
        one.flush()
    assert received == [{"long": 10**6 * "x"}]


def test_a_gap_counts_as_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended for an hour, a loop has not waited for anybody for an hour."""
    loop = Loop()
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 3600)
    loop.turn()
    assert loop.clock == LONGEST
    loop.turn()
    assert loop.clock == LONGEST


def test_nobody_is_called_who_was_forgotten_meanwhile() -> None:
    """Two have something to read, and the first to be called has the second one closed."""
    loop, called = Loop(), []
    ends = [socket.socketpair() for _ in range(2)]

    def read(own: int, other: int) -> None:
        called.append(own)
        loop.forget(ends[other][0])

    for own, other in ((0, 1), (1, 0)):
        loop.watch(ends[own][0], lambda own=own, other=other: read(own, other))
        ends[own][1].send(b"x")
    loop.turn()
    assert len(called) == 1
