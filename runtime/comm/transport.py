"""The interface of transports, which carry tensors from stage to stage, and what they share.

All transports are a rendezvous, like gloo underneath: nothing moves, and no send completes, until
its receive is posted. Hence receives are posted ahead:

    stage 0   F send = = = = = = = = wait       the receive comes late: the send waits for it,
    stage 1   ....computes....  post -> wait    and its bytes start to move only now

    stage 0   F send -> wait                    posted ahead: they move while stage 1 computes
    stage 1   post ....computes.... wait

A channel (source stage, target stage, flow) carries one or more tensors a micro-batch, told apart
by their slot: 0, 1, ... Matching is by (channel, slot), in the order of posting on one side and of
sending on the other. A transport knows which rank holds which stage:

    both stages on one rank    `Mailbox`, in every transport
    ranks of one process       autopipe.runtime.comm.threads, for tests
    processes of one host      autopipe.runtime.comm.cma_transport, CPU tensors
    processes, CPU tensors     autopipe.runtime.comm.gloo
    processes, a GPU each      autopipe.runtime.comm.nccl

A transport carries the bytes of a tensor in the order of its storage, so every dtype works and a
transposed tensor is not copied. The contract: a buffer has the shape, dtype and strides of
`torch.empty_like(tensor)`. A dense tensor has these strides itself (its elements fill their part of
the storage, in any order); another tensor is cloned first. A tensor without elements sends no
message. Neither side may touch its tensor until `wait` has returned.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from autopipe.errors import ScheduleError
from autopipe.schedules.instructions import Channel


class Handle(Protocol):
    """One side of a transfer under way."""

    def wait(self) -> None:
        """Return when this side is complete; later calls return at once.

        Raises:
            RuntimeError: the peer is gone, or took too long.
            TimeoutError: between threads of one process, the other side never came.
            ScheduleError: this rank itself would have to bring the other side, after this call.
        """


class Transport(Protocol):
    """Sends and receives of one rank of a pipeline; only `Handle.wait` blocks."""

    def post(self, buffer: Tensor, channel: Channel, slot: int) -> Handle:
        """Make `buffer` ready for the next tensor that comes on (channel, slot)."""

    def send(self, tensor: Tensor, channel: Channel, slot: int) -> Handle:
        """Offer `tensor` to the channel's target stage on (channel, slot)."""

    def close(self) -> None:
        """Close the transport's connections; call it after the wait for every handle.

        Raises:
            RuntimeError: a transfer within this rank has not met its other side.
        """


class _Done:
    """The handle of a transfer that needs no message."""

    def wait(self) -> None:
        return


DONE = _Done()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their part of the storage without gap or overlap, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in steps if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def outgoing(tensor: Tensor) -> Tensor:
    """The tensor to send for `tensor`: its elements in storage order, contiguous, no autograd."""
    # x.conj() has the bytes of x and a flag, which would not be sent.
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    return _row(tensor if is_dense(tensor) else torch.empty_like(tensor).copy_(tensor))


def incoming(buffer: Tensor) -> Tensor:
    """The contiguous view of `buffer`, in storage order, that a receive fills."""
    assert is_dense(buffer), f"a buffer with gaps: shape {buffer.shape}, strides {buffer.stride()}"
    return _row(buffer)


def _row(tensor: Tensor) -> Tensor:
    """A dense tensor without autograd: itself if it is contiguous, else one flat row of it."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def as_bytes(row: Tensor) -> Tensor:
    """A contiguous tensor's memory as a uint8 tensor of one dim."""
    return row.view(-1).view(torch.uint8)


OTHER = {"send": "receive", "receive": "send"}


@dataclass(eq=False, slots=True)
class Side:
    """A send or a receive that may not have met its other side yet."""

    channel: Channel
    slot: int
    does: str
    data: Tensor
    done: bool = False

    def __str__(self) -> str:
        source, target, flow = self.channel
        way = f"stage {source} -> stage {target}, flow {flow.value}, slot {self.slot}"
        return f"{self.does} of {way}"

    def wait(self) -> None:
        """As `Handle.wait`, for a transfer within one rank: it is done, or it never will be."""
        if not self.done:
            raise ScheduleError(
                f"{self}: waited for before its {OTHER[self.does]} was issued, which the same "
                "rank would have to do: it would wait for ever",
                hint="in a schedule of your own, put SEND before WAIT and POST before FREE",
            )


@dataclass
class Mailbox:
    """Sends and receives that wait for their other side; it is a whole channel within one rank."""

    alone: dict[tuple[Channel, int, str], deque[Side]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    def post(self, buffer: Tensor, channel: Channel, slot: int) -> Side:
        """As `Transport.post`, between two stages of one rank."""
        return self.meet(Side(channel, slot, "receive", incoming(buffer)))

    def send(self, tensor: Tensor, channel: Channel, slot: int) -> Side:
        """As `Transport.send`, between two stages of one rank."""
        return self.meet(Side(channel, slot, "send", outgoing(tensor)))

    def meet(self, side: Side) -> Side:
        """Copy, if the other side is here already; else keep `side` until it comes.

        Raises:
            RuntimeError: the two sides have different numbers of bytes.
        """
        others = self.alone[side.channel, side.slot, OTHER[side.does]]
        if not others:
            self.alone[side.channel, side.slot, side.does].append(side)
            return side
        other = others.popleft()
        send, receive = (side, other) if side.does == "send" else (other, side)
        if send.data.nbytes != receive.data.nbytes:
            raise RuntimeError(
                f"{side}: {send.data.nbytes} bytes are sent, "
                f"and the buffer takes {receive.data.nbytes}"
            )
        as_bytes(receive.data).copy_(as_bytes(send.data))
        side.done = other.done = True
        return side

    def left(self) -> list[Side]:
        """The sends and receives that have not met their other side."""
        return [side for sides in self.alone.values() for side in sides]

    def close(self) -> None:
        """Check that no side is left.

        Raises:
            RuntimeError: one is.
        """
        for side in self.left():
            raise RuntimeError(f"{side}: closed before a {OTHER[side.does]} came")
