"""A transport between threads of one process, for tests and for a run of one rank.

    local_network([0, 1, 1, 0])  ->  transports of ranks 0 and 1; rank 0 holds stages 0 and 3

A deadlock raises `TimeoutError` instead of a hang. A rank that fails makes the others raise too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Condition

from torch import Tensor

from autopipe.runtime.comm.transport import DONE, OTHER, Handle, Mailbox, Side, incoming, outgoing
from autopipe.schedules.instructions import Channel


def local_network(stages: Sequence[int], timeout: float = 30.0) -> list[LocalTransport]:
    """Transports that join ranks within this process, each run by a thread of its own.

    Args:
        stages: the rank of each stage; ranks count from 0.
        timeout: seconds after which a wait raises TimeoutError.

    Returns:
        One transport per rank, in their order.
    """
    network = _Network(tuple(stages), timeout)
    return [LocalTransport(rank, network) for rank in range(max(stages) + 1)]


class LocalTransport:
    """One rank's end of a `local_network`."""

    def __init__(self, rank: int, network: _Network) -> None:
        self._rank = rank
        self._network = network
        self._own = Mailbox()

    def post(self, buffer: Tensor, channel: Channel, slot: int) -> Handle:
        """As `Transport.post`."""
        if buffer.numel() == 0:
            return DONE
        if self._network.stages[channel.source] == self._rank:
            return self._own.post(buffer, channel, slot)
        return self._network.meet(Side(channel, slot, "receive", incoming(buffer)))

    def send(self, tensor: Tensor, channel: Channel, slot: int) -> Handle:
        """As `Transport.send`."""
        if tensor.numel() == 0:
            return DONE
        if self._network.stages[channel.target] == self._rank:
            return self._own.send(tensor, channel, slot)
        return self._network.meet(Side(channel, slot, "send", outgoing(tensor)))

    def abort(self, error: BaseException) -> None:
        """Report that this rank has failed: other ranks' waits, also later ones, raise from it."""
        self._network.abort(self._rank, error)

    def close(self) -> None:
        """Check that all of this rank's transfers are complete.

        Raises:
            RuntimeError: a send or a receive has not met its other side.
        """
        if self._network.failed is None:
            self._own.close()
            self._network.close(self._rank)


@dataclass
class _Network:
    """A mailbox that several threads share, under one lock."""

    stages: tuple[int, ...]
    timeout: float
    mailbox: Mailbox = field(default_factory=Mailbox)
    failed: tuple[int, BaseException] | None = None
    changed: Condition = field(default_factory=Condition)

    def meet(self, side: Side) -> Handle:
        with self.changed:
            self._check()
            self.mailbox.meet(side)
            if side.done:
                self.changed.notify_all()
                return side
        return _Waiting(side, self)

    def wait(self, side: Side) -> None:
        with self.changed:
            self.changed.wait_for(lambda: side.done or self.failed is not None, self.timeout)
            if side.done:
                return
            self._check()
            raise TimeoutError(f"{side}: no {OTHER[side.does]} came within {self.timeout:g} s")

    def abort(self, rank: int, error: BaseException) -> None:
        with self.changed:
            self.failed = self.failed or (rank, error)
            self.changed.notify_all()

    def close(self, rank: int) -> None:
        with self.changed:
            for side in self.mailbox.left():
                stage = side.channel.source if side.does == "send" else side.channel.target
                if self.stages[stage] == rank:
                    raise RuntimeError(f"{side}: closed before a {OTHER[side.does]} came")

    def _check(self) -> None:
        if self.failed is not None:
            rank, error = self.failed
            raise RuntimeError(f"rank {rank} has failed: {error}") from error


@dataclass(slots=True)
class _Waiting:
    """The handle of a side whose other side another thread has to bring."""

    side: Side
    network: _Network

    def wait(self) -> None:
        if not self.side.done:
            self.network.wait(self.side)
