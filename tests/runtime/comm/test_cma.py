"""A wire within one process: words in their order, copies whole, and what is said of a dead end."""

import ctypes
import errno
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autopipe.runtime.comm import cma
from autopipe.runtime.comm.cma import CmaWire, Word

pytestmark = pytest.mark.skipif(cma.CALLS is None, reason="takes Linux")


@pytest.fixture
def ends() -> Iterator[tuple[CmaWire, CmaWire]]:
    """Both ends of a wire from this process to itself: to rank 1, and to rank 0."""
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    made = CmaWire(1, os.getpid(), one), CmaWire(0, os.getpid(), other)
    yield made
    for wire in made:
        wire.close()


def heard(wire: CmaWire) -> list[Word]:
    """All that has come."""
    found: list[Word] = []
    while select.select([wire.end], [], [], 0)[0] and not wire.closed:
        found += wire.hear()
    return found


def test_words_both_ways(ends: tuple[CmaWire, CmaWire]) -> None:
    zero, one = ends
    zero.tell(1, 2, 3, 4, 5)
    zero.tell(0, 2**62, 0, 2**47, 0)
    one.tell(2, 0, 0, 0, 0)
    assert heard(one) == [(1, 2, 3, 4, 5), (0, 2**62, 0, 2**47, 0)]
    assert heard(zero) == [(2, 0, 0, 0, 0)]
    assert list(zero.hear()) == []


def test_a_socket_without_room(ends: tuple[CmaWire, CmaWire]) -> None:
    """`tell` keeps what does not go, in the order of saying, and `flush` says it."""
    zero, one = ends
    said = [(0, number, 0, 0, 0) for number in range(5000)]
    for word in said:
        zero.tell(*word)
    assert zero.backlog
    found = heard(one)
    assert 0 < len(found) < len(said)
    while zero.backlog:
        zero.flush()
        found += heard(one)
    assert found == said


def test_a_word_in_two_parts(ends: tuple[CmaWire, CmaWire]) -> None:
    zero, one = ends
    words = cma._WORD.pack(1, 2, 3, 4, 5) + cma._WORD.pack(6, 7, 8, 9, 10)
    zero.end.send(words[:50])
    assert list(one.hear()) == [(1, 2, 3, 4, 5)]
    zero.end.send(words[50:53])
    assert list(one.hear()) == []
    zero.end.send(words[53:])
    assert list(one.hear()) == [(6, 7, 8, 9, 10)]


def test_the_last_words_of_a_closed_end(ends: tuple[CmaWire, CmaWire]) -> None:
    """They are heard, though it had not heard all that it was told; then the wire is closed."""
    zero, one = ends
    one.tell(9, 9, 9, 9, 9)
    zero.tell(1, 2, 3, 4, 5)
    zero.close()
    one.tell(9, 9, 9, 9, 9)  # to nobody
    assert heard(one) == [(1, 2, 3, 4, 5)]
    assert one.closed and not one.backlog
    one.tell(9, 9, 9, 9, 9)
    assert not one.backlog


def copies(wire: CmaWire, size: int) -> None:
    """There and back, with something before and behind that stays."""
    here, there = torch.arange(size + 2) + 1, torch.zeros(size + 2, dtype=torch.int64)
    wire.write(here.data_ptr() + 8, there.data_ptr() + 8, 8 * size)
    assert torch.equal(there[1:-1], here[1:-1]) and there[0] == there[-1] == 0
    here[1:-1] = 0
    wire.read(here.data_ptr() + 8, there.data_ptr() + 8, 8 * size)
    assert torch.equal(here[1:-1], there[1:-1]) and here[0] == 1 and here[-1] == size + 2


def test_copies(ends: tuple[CmaWire, CmaWire]) -> None:
    for size in (1, 1000, 1 << 20):
        copies(ends[0], size)


def test_a_copy_in_parts(ends: tuple[CmaWire, CmaWire], monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux copies no more than 2 GiB in a call; here it is 3,000 bytes."""
    assert cma.CALLS is not None
    sizes = []

    def cut(call: Any) -> Any:
        def at_most(pid: int, here: Any, one: int, there: Any, other: int, flags: int) -> int:
            for piece in (here.contents, there.contents):
                piece.size = min(piece.size, 3000)
            sizes.append(here.contents.size)
            done: int = call(pid, here, one, there, other, flags)
            return done

        return at_most

    monkeypatch.setattr(cma, "CALLS", tuple(cut(call) for call in cma.CALLS))
    copies(CmaWire(1, os.getpid(), ends[0].end), 1000)
    assert sizes == [3000, 3000, 2000] * 2


def test_memory_that_is_not_there(ends: tuple[CmaWire, CmaWire]) -> None:
    here = ctypes.create_string_buffer(8)
    with pytest.raises(OSError) as bad:
        ends[0].write(ctypes.addressof(here), 8, 8)
    assert bad.value.errno == errno.EFAULT


def test_a_process_that_is_gone(ends: tuple[CmaWire, CmaWire]) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    wire = CmaWire(1, child.pid, ends[0].end)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    here = ctypes.create_string_buffer(8)
    with pytest.raises(ProcessLookupError):
        wire.read(ctypes.addressof(here), ctypes.addressof(here), 8)
