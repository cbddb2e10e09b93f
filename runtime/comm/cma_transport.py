"""Transfers between processes of one host: each tensor copied once, from memory to memory.

The side that has time copies:

    rank 0    ....computes.... send ====== ...            the receiver computes, its buffer is
                                  offer ^  v done         offered: the sender writes into it
    rank 1    post ---------------------'......... wait

    rank 0    send ------. ....computes........           the receiver waits: it reads, and
                   offer v              ^ done            the sender goes on with its work
    rank 1    post  wait ================

    rank 0    send -.  ....computes............           the receive comes late: it reads, and
                    | offer             ^ done            the sender has nothing more to do
    rank 1    ......v.. post ===========  wait

There is no thread: in `post` and `send` a rank reads the peer's words, and while it waits those of
all its peers. A word on a wire is one of three:

    offer    from a side that cannot copy now: its (channel, slot), its address, its bytes
    want     from a receiver: it waits for this tensor and computes nothing meanwhile
    done     from the side that has copied, to the side that made the offer

If the offers of both sides cross, the receiver copies. The n-th post of a (channel, slot) meets the
n-th send, as words on a wire keep their order. If the two sizes differ, nothing is copied and both
sides raise.

A channel that leaves the host goes over gloo.
"""

from __future__ import annotations

import errno
import math
import select
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from torch import Tensor

from autopipe.runtime.comm.cma import CmaWire, Word
from autopipe.runtime.comm.gloo import GlooTransport
from autopipe.runtime.comm.transport import DONE, OTHER, Handle, Mailbox, Side, incoming, outgoing
from autopipe.runtime.launch.world import TIMEOUT
from autopipe.schedules.instructions import Channel, Flow

_OFFER, _WANT, _DONE = range(3)

_SLOTS = 32
"""Bits of the slot in a place's number; the bits above are the channel's number."""

_abandoned: list[Tensor] = []
"""Buffers offered but not met when their transport closed: the peer may still write to them."""


class DirectTransport:
    """One rank's end of one pipeline, for tensors in host memory.

    Args:
        stages: the global rank of each stage of this pipeline.
        rank: this process's global rank.
        wires: as `cma_links.make_links` has made them; `close` closes them.
        far: for channels to ranks without a wire; `close` closes it too.
        timeout: seconds that a transfer waits for its other side.
    """

    def __init__(
        self,
        stages: Sequence[int],
        rank: int,
        wires: Mapping[int, CmaWire],
        far: GlooTransport | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self._stages = tuple(stages)
        self._rank = rank
        self._far = far
        self._own = Mailbox()
        self._routes: dict[Channel, _Route] = {}
        self._exchange = _Exchange(wires, timeout)

    def post(self, buffer: Tensor, channel: Channel, slot: int) -> Handle:
        """As `Transport.post`."""
        if buffer.numel() == 0:
            return DONE
        route = self._routes.get(channel) or self._route(channel)
        if route.line is None:
            return route.elsewhere.post(buffer, channel, slot)
        return self._exchange.meet(
            route.line, route.place + slot, channel, slot, "receive", incoming(buffer)
        )

    def send(self, tensor: Tensor, channel: Channel, slot: int) -> Handle:
        """As `Transport.send`."""
        if tensor.numel() == 0:
            return DONE
        route = self._routes.get(channel) or self._route(channel)
        if route.line is None:
            return route.elsewhere.send(tensor, channel, slot)
        return self._exchange.meet(
            route.line, route.place + slot, channel, slot, "send", outgoing(tensor)
        )

    def close(self) -> None:
        """As `Transport.close`; it also checks the transfers between ranks.

        Raises:
            RuntimeError: a send or a receive has not met its other side; `far` is closed even so.
        """
        try:
            self._own.close()
            self._exchange.close()
        finally:
            if self._far is not None:
                self._far.close()

    def _route(self, channel: Channel) -> _Route:
        source, target = self._stages[channel.source], self._stages[channel.target]
        number = 2 * (channel.source * len(self._stages) + channel.target)
        number += channel.flow is Flow.GRADIENT
        line, elsewhere = None, self._far or self._own
        if source == target:
            elsewhere = self._own
        else:
            line = self._exchange.lines.get(target if source == self._rank else source)
            assert line is not None or self._far is not None, f"{channel} is not among the edges"
        self._routes[channel] = route = _Route(line, number << _SLOTS, elsewhere)
        return route


class _Route(NamedTuple):
    """Where the transfers of a channel go; its slot s is the place `place + s` of the line."""

    line: _Line | None
    place: int
    elsewhere: Mailbox | GlooTransport  # used if there is no line


@dataclass(eq=False, slots=True)
class _Transfer:
    """The handle of a send or a receive that could not copy at once."""

    exchange: _Exchange
    line: _Line
    channel: Channel
    slot: int
    does: str
    data: Tensor  # kept alive: the other process copies from or to it
    place: int
    there: int = -1  # bytes of the other side, once they are known
    done: bool = False
    ticket: int = -1  # the number of its offer; -1 before it is offered

    def wait(self) -> None:
        if not self.done or self.exchange.full():
            self.exchange.wait(self)
        if self.there != self.data.nbytes:
            sends, takes = self.data.nbytes, self.there
            if self.does == "receive":
                sends, takes = takes, sends
            raise RuntimeError(f"{self}: {sends} bytes are sent, and the buffer takes {takes}")

    def __str__(self) -> str:
        return str(Side(self.channel, self.slot, self.does, self.data))


@dataclass(slots=True)
class _Offer:
    """A send or a receive that the other rank has offered, not met yet by this rank's side."""

    ticket: int
    address: int
    size: int
    wanted: bool = False


class _Line:
    """The open offers between this rank and one peer."""

    def __init__(self, wire: CmaWire) -> None:
        self.wire = wire
        self.heard: defaultdict[int, deque[_Offer]] = defaultdict(deque)
        """By place, the peer's offers that this rank has not met yet."""
        self.offered: defaultdict[int, deque[_Transfer]] = defaultdict(deque)
        """By place, this rank's offers that the peer has not met yet."""
        self.open: dict[int, _Transfer] = {}
        """By ticket, this rank's transfers that are not done."""
        self._tickets = count()

    def offer(self, transfer: _Transfer) -> None:
        """Offer a transfer to the peer."""
        transfer.ticket = ticket = next(self._tickets)
        self.open[ticket] = transfer
        data = transfer.data
        self.wire.tell(_OFFER, ticket, transfer.place, data.data_ptr(), data.nbytes)

    def want(self, transfer: _Transfer) -> None:
        """Tell the peer that this rank waits for an offered transfer."""
        self.wire.tell(_WANT, transfer.ticket, transfer.place, 0, 0)

    def copy(self, does: str, data: Tensor, offer: _Offer) -> bool:
        """Meet an offer of the peer; returns whether the transfer is done: not if the peer is gone.

        Raises:
            RuntimeError: the system refuses a copy that it allowed when the wire was made.
        """
        size = data.nbytes
        if self.wire.closed:
            return False
        if size == offer.size:
            try:
                if does == "send":
                    self.wire.write(data.data_ptr(), offer.address, size)
                else:
                    self.wire.read(data.data_ptr(), offer.address, size)
            except OSError as error:
                if error.errno == errno.ESRCH:
                    self.wire.give_up()
                    return False
                raise RuntimeError(
                    f"cannot copy {size} bytes between this process and rank {self.wire.rank}: "
                    f"{error.strerror}"
                ) from error
        self.wire.tell(_DONE, offer.ticket, 0, 0, size)
        return True

    def take(self, word: Word) -> None:
        """Act on a word of the peer."""
        kind, ticket, place, address, size = word
        if kind == _DONE:
            transfer = self.open.pop(ticket)
            offered = self.offered[transfer.place]
            if offered and offered[0] is transfer:
                offered.popleft()
            transfer.there, transfer.done = size, True
        elif kind == _WANT:
            for offer in self.heard[place]:
                if offer.ticket == ticket:  # not found: it has been met by now
                    offer.wanted = True
        elif not self.offered[place]:
            self.heard[place].append(_Offer(ticket, address, size))
        else:  # the offers have crossed
            transfer = self.offered[place].popleft()
            if transfer.does == "receive":
                offer = _Offer(ticket, address, size)
                transfer.there, transfer.done = size, self.copy("receive", transfer.data, offer)
                if transfer.done:
                    del self.open[transfer.ticket]


class _Exchange:
    """All lines of a rank: while the rank waits on one, it serves them all.

    So ranks that wait for each other, or in a cycle, still answer each other's offers.
    """

    def __init__(self, wires: Mapping[int, CmaWire], timeout: float) -> None:
        self.lines = {rank: _Line(wire) for rank, wire in wires.items()}
        self._wires = tuple(wires.values())
        self._timeout = timeout
        self._by_number = {line.wire.end.fileno(): line for line in self.lines.values()}
        self._poll = select.poll()
        for number in self._by_number:
            self._poll.register(number, select.POLLIN)

    def meet(
        self, line: _Line, place: int, channel: Channel, slot: int, does: str, data: Tensor
    ) -> Handle:
        """Copy if the peer has offered its side; else offer this side to the peer."""
        self._serve(0)
        heard = line.heard[place]
        if not heard:
            transfer = _Transfer(self, line, channel, slot, does, data, place)
            line.offered[place].append(transfer)
            line.offer(transfer)
            return transfer
        offer = heard.popleft()
        if offer.wanted and offer.size == data.nbytes:
            transfer = _Transfer(self, line, channel, slot, does, data, place)
            line.offer(transfer)  # it crosses with the peer's offer
            return transfer
        done = line.copy(does, data, offer)
        if done and offer.size == data.nbytes and not self.full():
            return DONE
        return _Transfer(self, line, channel, slot, does, data, place, offer.size, done)

    def full(self) -> bool:
        """Whether some wire had no room for a word."""
        for wire in self._wires:
            if wire.backlog:
                return True
        return False

    def wait(self, transfer: _Transfer) -> None:
        """Return when `transfer` is done and no words are left to send.

        Another rank may wait for such a word, and it is unknown when this rank next calls the
        transport.

        Raises:
            RuntimeError: the other side is gone, or did not come in time.
        """
        end = time.monotonic() + self._timeout
        self._serve(0)
        if transfer.does == "receive" and not transfer.done:
            transfer.line.want(transfer)
        while not transfer.done or self.full():
            if not transfer.done and transfer.line.wire.closed:
                raise RuntimeError(f"Connection closed by peer: rank {transfer.line.wire.rank}")
            left = end - time.monotonic()
            if left <= 0:
                what = f"no {OTHER[transfer.does]} came"
                if transfer.done:
                    what = "another rank does not listen"
                raise RuntimeError(f"Timed out waiting: {transfer}: {what} in {self._timeout:g} s")
            self._serve(left)

    def _serve(self, seconds: float) -> None:
        """Act on the peers' words; wait up to `seconds` for the first one."""
        full = [wire for wire in self._wires if wire.backlog]
        for wire in full:
            self._poll.modify(wire.end, select.POLLIN | select.POLLOUT)
        events = self._poll.poll(math.ceil(1e3 * seconds))
        for wire in full:
            self._poll.modify(wire.end, select.POLLIN)
            wire.flush()
        for number, event in events:
            if event != select.POLLOUT:
                line = self._by_number[number]
                for word in line.wire.hear():
                    line.take(word)
                if line.wire.closed:
                    self._poll.unregister(number)

    def close(self) -> None:
        """Close all wires.

        Raises:
            RuntimeError: a side is not done.
        """
        left = [transfer for line in self.lines.values() for transfer in line.open.values()]
        _abandoned.extend(transfer.data for transfer in left)
        for wire in self._wires:
            wire.close()
        for transfer in left:
            raise RuntimeError(f"{transfer}: closed before a {OTHER[transfer.does]} came")
