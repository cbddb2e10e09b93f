"""Direct transfers: stories between real processes, and within one who copies, and when."""

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe.runtime.comm.cma import CALLS, CmaWire, Word
from autopipe.runtime.comm.cma_transport import DirectTransport
from autopipe.runtime.comm.transport import Handle
from autopipe.runtime.launch.words import is_echo
from autopipe.schedules.instructions import Flow
from tests.support.transport_stories import STORIES, B, F, Story, check, on, told

pytestmark = pytest.mark.skipif(CALLS is None, reason="takes Linux")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return told("direct", tmp_path_factory.mktemp("direct"))


@pytest.mark.parametrize("story", STORIES)
def test_story(story: Story, folder: Path) -> None:
    check(story, folder)


def test_it_closes(folder: Path) -> None:
    assert (folder / "code").read_text() == "0"


class Watched(CmaWire):
    """A wire that notes who copies, and holds words back if it is told to."""

    copies: list[str]
    held: list[Word] | None = None

    def tell(self, kind: int, ticket: int, place: int, address: int, size: int) -> None:
        if self.held is None:
            super().tell(kind, ticket, place, address, size)
        else:
            self.held.append((kind, ticket, place, address, size))

    def release(self, number: int | None = None) -> None:
        """Say the first `number` of the words held back, or all."""
        held, self.held = self.held or [], None
        for word in held[:number]:
            self.tell(*word)
        if number is not None:
            self.held = held[number:]

    def read(self, here: int, there: int, size: int) -> None:
        self.copies.append("receiver reads")
        super().read(here, there, size)

    def write(self, here: int, there: int, size: int) -> None:
        self.copies.append("sender writes")
        super().write(here, there, size)


class Pair:
    """Ranks 0 and 1, a stage each, in one process; `copies` is who has copied."""

    def __init__(self, timeout: float = 0.0, pid: int | None = None) -> None:
        self.copies: list[str] = []
        self.wires: list[Watched] = []
        for rank, end in enumerate(socket.socketpair()):
            end.setblocking(False)
            self.wires.append(Watched(1 - rank, pid or os.getpid(), end))
            self.wires[rank].copies = self.copies
        self.zero, self.one = (
            DirectTransport((0, 1), rank, {1 - rank: wire}, timeout=timeout)
            for rank, wire in enumerate(self.wires)
        )


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    """Pairs that are closed afterwards, whatever has become of them."""
    with ExitStack() as opened:

        def make(**how: Any) -> Pair:
            made = Pair(**how)
            for wire in made.wires:
                opened.callback(wire.close)
            return made

        yield make


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    """Ranks 0 and 1, without patience."""
    return make_pair()


def late(handle: Handle) -> None:
    """Wait in vain: who has no patience says that it waits, and gives up."""
    with pytest.raises(RuntimeError, match="Timed out"):
        handle.wait()


TENSOR = torch.arange(6.0)


def test_posted_ahead(pair: Pair) -> None:
    buffer = torch.zeros(6)
    post = pair.one.post(buffer, on(0, 1), 0)
    send = pair.zero.send(TENSOR, on(0, 1), 0)
    assert pair.copies == ["sender writes"] and torch.equal(buffer, TENSOR)
    send.wait()
    post.wait()


def test_posted_late(pair: Pair) -> None:
    """The sender is not asked again: it may be at work for long."""
    buffer = torch.zeros(6)
    send = pair.zero.send(TENSOR, on(0, 1), 0)
    post = pair.one.post(buffer, on(0, 1), 0)
    assert pair.copies == ["receiver reads"] and torch.equal(buffer, TENSOR)
    post.wait()
    send.wait()


def test_a_receiver_that_waits_copies(pair: Pair) -> None:
    buffer = torch.zeros(6)
    post = pair.one.post(buffer, on(0, 1), 0)
    late(post)
    send = pair.zero.send(TENSOR, on(0, 1), 0)
    assert pair.copies == []
    post.wait()
    assert pair.copies == ["receiver reads"] and torch.equal(buffer, TENSOR)
    send.wait()


def test_offers_that_cross(pair: Pair) -> None:
    buffer = torch.zeros(6)
    pair.wires[1].held = []
    post = pair.one.post(buffer, on(0, 1), 0)
    send = pair.zero.send(TENSOR, on(0, 1), 0)
    pair.wires[1].release()
    late(send)  # it hears of the post, and leaves it at that
    assert pair.copies == []
    post.wait()
    assert pair.copies == ["receiver reads"] and torch.equal(buffer, TENSOR)
    send.wait()


def test_any_call_answers_the_others(pair: Pair) -> None:
    """Rank 1 sees what rank 0 offers, on another channel, at its next call."""
    buffer = torch.zeros(6)
    pair.wires[0].held = []
    pair.one.post(buffer, on(0, 1), 0)
    pair.wires[1].held = []
    send = pair.zero.send(TENSOR, on(0, 1), 1)
    post = pair.one.post(torch.zeros(6), on(0, 1), 1)
    pair.wires[0].release()
    pair.wires[1].release()
    pair.one.send(TENSOR, on(1, 0, B), 0)
    assert pair.copies == ["receiver reads"]
    post.wait()
    send.wait()


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_order(pair: Pair, seed: int) -> None:
    """Posts, sends, impatient waits and words in any order: the n-th always meets the n-th."""
    chance = random.Random(seed)
    ranks = pair.zero, pair.one
    channels = [(channel, slot) for channel in (on(0, 1), on(1, 0, B)) for slot in range(2)]
    many = 12
    buffers = {place: torch.zeros(many, 3) for place in channels}
    left = [(place, does, iter(range(many))) for place in channels for does in ("post", "send")]
    handles: list[Handle] = []
    for wire in pair.wires:
        wire.held = []
    while left:
        turn = chance.random()
        if turn < 0.5:
            place, does, numbers = choice = chance.choice(left)
            (channel, slot), k = place, next(numbers, None)
            if k is None:
                left.remove(choice)
            elif does == "post":
                handles.append(ranks[channel.target].post(buffers[place][k], channel, slot))
            else:
                tensor = torch.full((3,), 100.0 * channels.index(place) + k)
                handles.append(ranks[channel.source].send(tensor, channel, slot))
        elif turn < 0.7 and handles:
            try:
                chance.choice(handles).wait()
            except RuntimeError as error:
                assert "Timed out" in str(error)
        else:
            chance.choice(pair.wires).release(chance.randrange(20))
    for wire in pair.wires:
        wire.release()
    for _ in range(2):  # each rank has its turn
        for handle in handles:
            try:
                handle.wait()
            except RuntimeError as error:
                assert "Timed out" in str(error)
    for handle in handles:
        handle.wait()
    for index, place in enumerate(channels):
        assert buffers[place][:, 0].tolist() == [100.0 * index + k for k in range(many)]
    # Both ways, many times: the words are let go in such portions that neither is an exception.
    assert min(pair.copies.count(way) for way in ("sender writes", "receiver reads")) >= 3
    assert len(pair.copies) == len(channels) * many
    pair.zero.close()
    pair.one.close()


@pytest.mark.parametrize("first", ["post", "send", "wait"])
def test_sizes_that_differ(pair: Pair, first: str) -> None:
    """Both sides raise the same sizes, and not a byte is written."""
    buffer = torch.zeros(4)
    if first == "send":
        send = pair.zero.send(TENSOR, on(0, 1), 2)
        post = pair.one.post(buffer, on(0, 1), 2)
    else:
        post = pair.one.post(buffer, on(0, 1), 2)
        if first == "wait":
            late(post)
        send = pair.zero.send(TENSOR, on(0, 1), 2)
    for handle, does in ((send, "send"), (post, "receive")):
        for _ in range(2):
            with pytest.raises(RuntimeError) as wrong:
                handle.wait()
            assert str(wrong.value) == (
                f"{does} of stage 0 -> stage 1, flow F, slot 2: 24 bytes are sent, "
                "and the buffer takes 16"
            )
    assert pair.copies == [] and not buffer.any()


def test_nobody_comes(pair: Pair) -> None:
    handles = {
        "receive of stage 1 -> stage 0, flow B, slot 1: no send": pair.zero.post(
            torch.zeros(1), on(1, 0, B), 1
        ),
        "send of stage 0 -> stage 1, flow F, slot 0: no receive": pair.zero.send(
            TENSOR, on(0, 1), 0
        ),
    }
    for words, handle in handles.items():
        with pytest.raises(RuntimeError) as nobody:
            handle.wait()
        assert str(nobody.value) == f"Timed out waiting: {words} came in 0 s"
        assert is_echo(nobody.value)


def test_a_rank_that_closes(pair: Pair) -> None:
    """What it has said is still heard; what it has not, raises in whatever waits for it."""
    first, second = torch.zeros(6), torch.zeros(6)
    posts = [pair.one.post(buffer, on(0, 1), 0) for buffer in (first, second)]
    pair.zero.send(TENSOR, on(0, 1), 0).wait()
    pair.zero.close()
    posts[0].wait()
    assert torch.equal(first, TENSOR)
    after = pair.one.send(TENSOR, on(1, 0, B), 0)  # neither posts nor sends are refused
    for handle in (posts[1], after):
        with pytest.raises(RuntimeError, match="^Connection closed by peer: rank 0$") as gone:
            handle.wait()
        assert is_echo(gone.value)


@pytest.mark.parametrize("offered_first", [True, False])
def test_a_rank_that_is_killed(make_pair: Callable[..., Pair], offered_first: bool) -> None:
    """Between its offer and the copy; the socket may know later than the system call."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    pair = make_pair(pid=child.pid)
    if offered_first:
        pair.one.post(torch.zeros(6), on(0, 1), 0)
        handle = pair.zero.send(TENSOR, on(0, 1), 0)
    else:
        pair.wires[1].held = []
        handle = pair.one.post(torch.zeros(6), on(0, 1), 0)
        pair.zero.send(TENSOR, on(0, 1), 0)
    with pytest.raises(RuntimeError, match="^Connection closed by peer: rank [01]$"):
        handle.wait()


def test_a_copy_that_is_refused(pair: Pair) -> None:
    """Memory that has gone is no reason to believe that the rank has."""
    pair.wires[1].held = []
    pair.one.post(torch.zeros(6), on(0, 1), 0)
    ((kind, ticket, place, _, size),) = pair.wires[1].held
    pair.wires[1].held = [(kind, ticket, place, 64, size)]
    pair.wires[1].release()
    with pytest.raises(RuntimeError, match="24 bytes between .* and rank 1: Bad address"):
        pair.zero.send(TENSOR, on(0, 1), 0)


def test_no_word_is_kept_back(make_pair: Callable[..., Pair]) -> None:
    """A wait returns when the others can know all: this rank may call no more.

    Rank 0 meets all posts at once, and the words for it no longer go into the socket; rank 1, which
    waits for the last one, has to hear them.
    """
    many = 100
    pair = make_pair(timeout=5)
    pair.wires[0].end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # Linux makes it 4,608
    found = torch.zeros(many, 1)
    posts = [pair.one.post(found[k], on(0, 1), 0) for k in range(many)]
    sends = [pair.zero.send(torch.full((1,), float(k)), on(0, 1), 0) for k in range(many)]
    assert found[:, 0].tolist() == list(range(many)) and pair.wires[0].backlog
    with ThreadPoolExecutor() as threads:
        end = threads.submit(sends[-1].wait)
        posts[-1].wait()
        end.result()
    assert not pair.wires[0].backlog
    pair.zero.close()
    pair.one.close()


def test_a_wait_does_not_turn_around_a_closed_wire(pair: Pair) -> None:
    """Rank 0 waits for rank 2 and sleeps, though rank 1 has ended, as ranks do when they are done.

    A closed socket is always ready: polled again, it would keep the core busy.
    """
    one, two = socket.socketpair()
    for end in (one, two):
        end.setblocking(False)
    heard = []

    class Counted(CmaWire):
        def hear(self) -> Iterator[Word]:
            heard.append(self.rank)
            return super().hear()

    wires = {1: Counted(1, os.getpid(), pair.wires[0].end), 2: Counted(2, os.getpid(), one)}
    zero = DirectTransport((0, 1, 2), 0, wires, timeout=0.1)
    pair.wires[1].close()
    post = zero.post(torch.zeros(6), on(2, 0, B), 0)
    late(post)
    assert heard == [1]
    for end in (one, two):
        end.close()


@pytest.mark.parametrize("flow", [F, B])
def test_closed_with_something_left(pair: Pair, flow: Flow) -> None:
    if flow is F:
        pair.zero.send(TENSOR, on(0, 1), 0)
        expected = "send of stage 0 -> stage 1, flow F, slot 0: closed before a receive came"
    else:
        pair.zero.post(torch.zeros(6), on(1, 0, B), 0)
        expected = "receive of stage 1 -> stage 0, flow B, slot 0: closed before a send came"
    with pytest.raises(RuntimeError) as left:
        pair.zero.close()
    assert str(left.value) == expected


def test_a_late_sender_writes_into_no_memory_of_others(pair: Pair) -> None:
    """Rank 1 has closed, with a post of which rank 0 has heard."""
    pair.one.post(torch.zeros(6), on(0, 1), 0)
    late(pair.zero.send(TENSOR, on(0, 1), 5))
    with pytest.raises(RuntimeError, match="closed before"):
        pair.one.close()
    send = pair.zero.send(TENSOR, on(0, 1), 0)
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1"):
        send.wait()
    assert pair.copies == []
