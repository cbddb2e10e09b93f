"""How tensors go from stage to stage: a receive and a send that meet, over gloo or in memory.

Both transports are a rendezvous, like gloo underneath: nothing moves, and no send completes, until
its receive is posted. Hence receives are posted ahead:

    stage 0   F send = = = = = = = = wait       the receive comes late: the send waits for it,
    stage 1   ....computes....  post -> wait    and its bytes start to move only now

    stage 0   F send -> wait                    posted ahead: they move while stage 1 computes
    stage 1   post ....computes.... wait

Matching is by (source, target, flow, tag), in the order of posting on one side and of sending on
the other.

What travels is the bytes of a tensor in the order of its storage, so every dtype goes and a
transposed tensor is not copied. The contract: a buffer has the shape, dtype and strides of
`torch.empty_like(tensor)`. Those are the tensor's own where it is dense (each element of its part
of the storage is one of its own, in whatever order); others are cloned first. A tensor without
elements is no message at all. Neither side may touch its tensor until `wait` has returned.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Condition
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.runtime.launch import TIMEOUT
from autopipe.schedule import Channel, Flow


class Handle(Protocol):
    """One side of a transfer under way."""

    def wait(self) -> None:
        """Return when this side is complete; again at once when called again.

        Raises:
            RuntimeError: the peer is gone, or took too long.
            TimeoutError: the same within a process: the other side never came.
        """


class Transport(Protocol):
    """What the executor of one stage needs of the world; nothing here blocks but `Handle.wait`."""

    def post(self, buffer: Tensor, source: int, flow: Flow, tag: int) -> Handle:
        """Make `buffer` ready for the next tensor that stage `source` sends on (flow, tag)."""

    def send(self, tensor: Tensor, target: int, flow: Flow, tag: int) -> Handle:
        """Offer `tensor` to stage `target` on (flow, tag)."""

    def close(self) -> None:
        """Give back what the transport holds; every handle has been waited for."""


class _Done:
    """The handle of a transfer that needs no message."""

    def wait(self) -> None:
        return


_DONE = _Done()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their part of the storage without gap or overlap, in any order."""
    expected = 1
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in steps if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _bytes(tensor: Tensor) -> Tensor:
    """The storage of a dense tensor as one row of bytes: a view, outside autograd."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _outgoing(tensor: Tensor) -> Tensor:
    # x.conj() and its .imag share the storage of x: they are other numbers in the same bytes.
    plain = tensor.detach().resolve_conj().resolve_neg()
    return _bytes(plain if is_dense(plain) else torch.empty_like(plain).copy_(plain))


def _incoming(buffer: Tensor) -> Tensor:
    assert is_dense(buffer), f"a buffer with gaps: shape {buffer.shape}, strides {buffer.stride()}"
    return _bytes(buffer)


def make_groups(world_size: int, timeout: float = TIMEOUT) -> dict[Flow, dist.ProcessGroup]:
    """One gloo group of all ranks per flow; every rank calls it, at the same point of its program.

    Two groups, because a receive posted ahead on the group that also carries the other direction
    makes gloo slower, not faster: 1.3 to 1.5 times against receives posted at the last moment
    (measured on 2 cores, torch 2.13, 2026-11). A send holds its pair's lock while it writes, and
    data that comes in on the same socket keeps gloo's thread spinning on that lock, on the core
    that the computation wants. With sockets and a thread for each direction this does not occur.

    Args:
        world_size: how many ranks there are.
        timeout: seconds that a transfer waits for its other side.
    """
    ranks, limit = list(range(world_size)), timedelta(seconds=timeout)
    return {flow: dist.new_group(ranks, timeout=limit, backend="gloo") for flow in Flow}


@dataclass(slots=True)
class _GlooHandle:
    work: dist.Work | None
    data: Tensor  # kept alive for gloo, which writes from another thread
    landing: Tensor | None = None  # where on the device to copy what has arrived in `data`

    def wait(self) -> None:
        if self.work is None:
            return
        self.work.wait()
        self.work = None
        if self.landing is not None:
            self.landing.copy_(self.data)


class GlooTransport:
    """Transfers of one pipeline between processes; tensors on a GPU pass through host memory.

    Args:
        ranks: the global rank of each stage of this pipeline.
        groups: as `make_groups` makes them; the transport owns them from here on.
    """

    def __init__(self, ranks: Sequence[int], groups: dict[Flow, dist.ProcessGroup]) -> None:
        self._ranks = tuple(ranks)
        self._groups = dict(groups)

    def post(self, buffer: Tensor, source: int, flow: Flow, tag: int) -> Handle:
        """As `Transport.post`; a buffer on a GPU is filled by `wait`, on the current stream."""
        if buffer.numel() == 0:
            return _DONE
        data, landing = _incoming(buffer), None
        if data.is_cuda:
            data, landing = torch.empty_like(data, device="cpu", pin_memory=True), data
        rank, group = self._ranks[source], self._groups[flow]
        return _GlooHandle(dist.irecv(data, src=rank, group=group, tag=tag), data, landing)

    def send(self, tensor: Tensor, target: int, flow: Flow, tag: int) -> Handle:
        """As `Transport.send`; for a tensor on a GPU it first waits for the current stream."""
        if tensor.numel() == 0:
            return _DONE
        data = _outgoing(tensor).cpu()
        rank, group = self._ranks[target], self._groups[flow]
        return _GlooHandle(dist.isend(data, dst=rank, group=group, tag=tag), data)

    def close(self) -> None:
        """Close the groups of both flows."""
        while self._groups:
            dist.destroy_process_group(self._groups.popitem()[1])


def local_network(stages: int, timeout: float = 30.0) -> list[LocalTransport]:
    """Transports that join so many stages within this process, each run by a thread of its own.

    Args:
        stages: how many; the transports come in their order.
        timeout: seconds until a wait is an error, so that a deadlock is one and not a hang.
    """
    network = _Network(timeout)
    return [LocalTransport(stage, network) for stage in range(stages)]


class LocalTransport:
    """One stage's end of a `local_network`: a rendezvous within one process, for tests."""

    def __init__(self, stage: int, network: _Network) -> None:
        self._stage = stage
        self._network = network

    def post(self, buffer: Tensor, source: int, flow: Flow, tag: int) -> Handle:
        """As `Transport.post`."""
        if buffer.numel() == 0:
            return _DONE
        channel = Channel(source, self._stage, flow)
        return self._network.meet(_Side(channel, tag, "receive", _incoming(buffer), self._network))

    def send(self, tensor: Tensor, target: int, flow: Flow, tag: int) -> Handle:
        """As `Transport.send`."""
        if tensor.numel() == 0:
            return _DONE
        channel = Channel(self._stage, target, flow)
        return self._network.meet(_Side(channel, tag, "send", _outgoing(tensor), self._network))

    def abort(self, error: BaseException) -> None:
        """Tell all stages that this one has failed: whoever waits, or comes to, raises from it."""
        self._network.abort(self._stage, error)

    def close(self) -> None:
        """Check that nothing is left of this stage's transfers.

        Raises:
            RuntimeError: a send or a receive has not met its other side.
        """
        self._network.close(self._stage)


_OTHER = {"send": "receive", "receive": "send"}


@dataclass(eq=False, slots=True)
class _Side:
    """A send or a receive, from when it is called until it has met its other side."""

    channel: Channel
    tag: int
    does: str
    data: Tensor
    network: _Network
    done: bool = False

    def __str__(self) -> str:
        source, target, flow = self.channel
        return f"{self.does} of stage {source} -> stage {target}, flow {flow.value}, tag {self.tag}"

    def wait(self) -> None:
        self.network.wait(self)


@dataclass
class _Network:
    """All sides of a `local_network` that have not met their other one, under one lock."""

    timeout: float
    alone: dict[tuple[Channel, int, str], deque[_Side]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    failed: tuple[int, BaseException] | None = None
    changed: Condition = field(default_factory=Condition)

    def meet(self, side: _Side) -> _Side:
        with self.changed:
            self._check()
            others = self.alone[side.channel, side.tag, _OTHER[side.does]]
            if not others:
                self.alone[side.channel, side.tag, side.does].append(side)
                return side
            other = others.popleft()
            send, receive = (side, other) if side.does == "send" else (other, side)
            if send.data.numel() != receive.data.numel():
                raise RuntimeError(
                    f"{side}: {send.data.numel()} bytes are sent, "
                    f"and the buffer takes {receive.data.numel()}"
                )
            receive.data.copy_(send.data)
            side.done = other.done = True
            self.changed.notify_all()
            return side

    def wait(self, side: _Side) -> None:
        with self.changed:
            self.changed.wait_for(lambda: side.done or self.failed is not None, self.timeout)
            if side.done:
                return
            self._check()
            raise TimeoutError(f"{side}: no {_OTHER[side.does]} came within {self.timeout:g} s")

    def abort(self, stage: int, error: BaseException) -> None:
        with self.changed:
            self.failed = self.failed or (stage, error)
            self.changed.notify_all()

    def close(self, stage: int) -> None:
        with self.changed:
            for side in (side for sides in self.alone.values() for side in sides):
                own = side.channel.source if side.does == "send" else side.channel.target
                if own == stage and self.failed is None:
                    raise RuntimeError(f"{side}: closed before a {_OTHER[side.does]} came")

    def _check(self) -> None:
        if self.failed is not None:
            stage, error = self.failed
            raise RuntimeError(f"stage {stage} has failed: {error}") from error
