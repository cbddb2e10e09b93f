"""Copies of a rank's tensors in the host's memory: away after use, back ahead of the next one.

    send      device ──> host      begins; what was sent before has left when it returns
    begin     device <── host      begins
    fetched                        the tensors, in new memory of the device

What is copied are storages, whole; tensors that share one share its copy. What is in the host's
memory already (the seeds that a GPU's attention keeps) stays as it is. On a GPU copies run in a
stream of their own, beside what computes, and to host memory that is page-locked; on a CPU, where
the device's memory is the host's, they are made at once, and memory is counted as on a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class _Placed(NamedTuple):
    """How a tensor lies in the storage of this number."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(eq=False)
class Sent:
    """Tensors that were sent to the host: their looks, and the copies of their storages.

    A tensor in place of its look was there already. `away` are the storages until they have left,
    `back` their new memory from `begin` on.
    """

    looks: tuple[_Placed | Tensor, ...]
    copies: list[Tensor]
    bytes: int
    away: list[Tensor] = field(default_factory=list)
    back: list[Tensor] = field(default_factory=list)
    done: object = None


class _Lane(Protocol):
    """What copies bytes."""

    def room(self, bytes: int) -> Tensor:
        """New memory of the host."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> object:
        """Begin to copy, after what has been computed so far; returns what `wait` takes."""

    def wait(self, done: object) -> None:
        """What is computed from now on comes after the copy."""


class _AtOnce:
    """Copies on a CPU."""

    def room(self, bytes: int) -> Tensor:
        return torch.empty(bytes, dtype=torch.uint8)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> object:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return None

    def wait(self, done: object) -> None:
        """It is over already."""


class _Beside:
    """Copies of a GPU, in a stream beside that which computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def room(self, bytes: int) -> Tensor:
        return torch.empty(bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> object:
        # The copy begins when its source has been computed and its new memory is free.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return done

    def wait(self, done: object) -> None:
        # Memory may be freed after it: later work in that memory runs after the copy.
        assert isinstance(done, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(done)


class HostCopies:
    """Moves tensors of one device to the host and back; an `Offloader` of `joint.offload`.

    Attributes:
        hold: told of bytes of the device that what is sent or fetched takes, more of them or
            (negative) fewer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.hold: Callable[[int], None] = lambda bytes: None
        self._lane: _Lane = _Beside(device) if device.type == "cuda" else _AtOnce()
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._leaving: Sent | None = None

    def send(self, tensors: Sequence[Tensor]) -> Sent:
        """Begin to copy tensors to the host, and keep nothing of the device but while they leave.

        What was sent before has left, for what is computed from now on.
        """
        storages = {_place(t): t.untyped_storage() for t in tensors if t.device == self._device}
        numbers = {key: number for number, key in enumerate(storages)}
        looks = tuple(
            _Placed(
                numbers[_place(tensor)],
                tensor.dtype,
                int(tensor.storage_offset()),
                tuple(tensor.shape),
                tensor.stride(),
            )
            if tensor.device == self._device
            else tensor
            for tensor in tensors
        )
        away = [
            torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            for storage in storages.values()
        ]
        sent = Sent(looks, [self._room(len(one)) for one in away], sum(map(len, away)), away)
        self.hold(sent.bytes)
        sent.done = self._lane.copy(sent.copies, away)
        self.settle()
        self._leaving = sent
        return sent

    def settle(self) -> None:
        """What was sent has left, for what is computed from now on."""
        if (sent := self._leaving) is not None:
            self._lane.wait(sent.done)
            sent.away.clear()
            self.hold(-sent.bytes)
            self._leaving = None

    def begin(self, sent: Sent) -> None:
        """Begin to copy tensors back, into new memory of the device."""
        self.hold(sent.bytes)
        sent.back = [
            torch.empty(len(copy), dtype=torch.uint8, device=self._device) for copy in sent.copies
        ]
        sent.done = self._lane.copy(sent.back, sent.copies)

    def fetched(self, sent: Sent) -> tuple[Tensor, ...]:
        """The tensors, in the layouts that they had."""
        self._lane.wait(sent.done)
        storages = [bytes.untyped_storage() for bytes in sent.back]
        sent.back = []
        return tuple(
            look
            if isinstance(look, Tensor)
            else torch.empty(0, dtype=look.dtype, device=self._device).set_(
                storages[look.storage],
                look.offset,
                look.shape,
                look.strides,
            )
            for look in sent.looks
        )

    def let_go(self, sent: Sent) -> None:
        """Nobody reads the tensors any longer; the host's memory is for others."""
        self.hold(-sent.bytes)
        for copy in sent.copies:
            self._free[len(copy)].append(copy)
        sent.copies = []

    def _room(self, bytes: int) -> Tensor:
        free = self._free[bytes]
        return free.pop() if free else self._lane.room(bytes)


def _place(tensor: Tensor) -> int:
    """Where a tensor's storage begins; two that are alive begin at two places."""
    return tensor.untyped_storage().data_ptr()
