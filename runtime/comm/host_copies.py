"""Copies of a rank's tensors in the host's memory: away after use, back ahead of the next one.

    send      device ──> host      a copy begins; the parcel sent before has left the device
    begin     device <── host      a copy begins
    fetched                        the tensors, in new memory of the device

Whole storages are copied, and tensors that share a storage share its copy. Tensors in the host's
memory (the seeds that a GPU's attention keeps) stay there. On a GPU the copies run beside the
computation, in a stream of their own, to page-locked host memory. On a CPU, whose memory is the
host's, they run at once, and bytes are counted as on a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class _Placed(NamedTuple):
    """A tensor's layout in a storage; `storage` is the storage's position in `Sent.copies`."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(eq=False)
class Sent:
    """Tensors that were sent to the host: a parcel.

    Attributes:
        looks: each tensor's layout, or the tensor itself if it was in the host's memory before.
        copies: the copies of the tensors' storages in the host's memory, as bytes.
        bytes: the bytes of these storages.
        away: the device's storages until their copy has ended.
        back: from `begin` on the new storages on the device.
        done: what the copier's `wait` takes for the parcel's last copy.
    """

    looks: tuple[_Placed | Tensor, ...]
    copies: list[Tensor]
    bytes: int
    away: list[Tensor] = field(default_factory=list)
    back: list[Tensor] = field(default_factory=list)
    done: object = None


class _Copier(Protocol):
    """Copies bytes between the device and the host."""

    def room(self, bytes: int) -> Tensor:
        """New memory of the host."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> object:
        """Begin copies that run after all computation so far; returns a handle for `wait`."""

    def wait(self, done: object) -> None:
        """Let all later computation run after the copies."""


class _AtOnce:
    """Copies on a CPU."""

    def room(self, bytes: int) -> Tensor:
        return torch.empty(bytes, dtype=torch.uint8, device="cpu")

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> object:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return None

    def wait(self, done: object) -> None:
        """Nothing: `copy` has returned after the copies."""


class _Beside:
    """Copies of a GPU, in a stream beside the computation's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def room(self, bytes: int) -> Tensor:
        return torch.empty(bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> object:
        # The copy begins when its source has been computed and its target's memory is free.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return done

    def wait(self, done: object) -> None:
        # From now on the source may be freed: later work in its memory runs after the copy.
        assert isinstance(done, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(done)


class HostCopies:
    """Moves tensors of one device to the host and back; an `Offloader` of `joint.offload`.

    Attributes:
        hold: called with the bytes of the device that parcels begin to hold, or (negative) with
            those that they no longer hold.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.hold: Callable[[int], None] = lambda bytes: None
        self._copier: _Copier = _Beside(device) if device.type == "cuda" else _AtOnce()
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._leaving: Sent | None = None

    def send(self, tensors: Sequence[Tensor]) -> Sent:
        """Begin to copy tensors to the host; their storages are held until the copy has ended.

        The parcel sent before is settled (`settle`).
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
        sent.done = self._copier.copy(sent.copies, away)
        self.settle()
        self._leaving = sent
        return sent

    def settle(self) -> None:
        """Release the last parcel's storages; later computation runs after the parcel's copy."""
        if (sent := self._leaving) is not None:
            self._copier.wait(sent.done)
            sent.away.clear()
            self.hold(-sent.bytes)
            self._leaving = None

    def begin(self, sent: Sent) -> None:
        """Begin to copy a parcel back, into new memory of the device."""
        self.hold(sent.bytes)
        sent.back = [
            torch.empty(len(copy), dtype=torch.uint8, device=self._device) for copy in sent.copies
        ]
        sent.done = self._copier.copy(sent.back, sent.copies)

    def fetched(self, sent: Sent) -> tuple[Tensor, ...]:
        """The parcel's tensors on the device, in their old layouts, after `begin`."""
        self._copier.wait(sent.done)
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
        """Free a parcel that has been fetched and read; later parcels use its host memory."""
        self.hold(-sent.bytes)
        for copy in sent.copies:
            self._free[len(copy)].append(copy)
        sent.copies = []

    def _room(self, bytes: int) -> Tensor:
        free = self._free[bytes]
        return free.pop() if free else self._copier.room(bytes)


def _place(tensor: Tensor) -> int:
    """The address of a tensor's storage, which is unique among storages that are alive."""
    return tensor.untyped_storage().data_ptr()
