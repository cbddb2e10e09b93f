"""Counts the bytes a stage holds, tensor by tensor, and remembers the fullest moment of a step.

It counts what a plan predicts: tensors kept for backward, received and posted buffers, and tensors
being sent. Parameters, gradients and optimizer state do not change within a step; the owner of the
optimizer adds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from autopipe.fake import storage_key


class Meter:
    """Bytes held now, and at the peak, by what they are for: "activations" or "transfers"."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self._users: Counter[int] = Counter()

    def hold(self, kind: str, bytes: int) -> None:
        """`bytes` more (or, negative, fewer) are held for `kind`."""
        self.now[kind] += bytes
        if self.now.total() > self.at_peak.total():
            self.at_peak = self.now.copy()

    @contextmanager
    def keeping(self, not_owned_by: Iterable[Tensor]) -> Iterator[None]:
        """Count what autograd saves inside as activations, until backward lets go of it.

        Storages of `not_owned_by` are left out: they are counted elsewhere.
        """
        owned = {storage_key(tensor) for tensor in not_owned_by}

        def pack(tensor: Tensor) -> Tensor | _Kept:
            return tensor if storage_key(tensor) in owned else _Kept(self, tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield

    def _keep(self, key: int, bytes: int) -> None:
        self._users[key] += 1
        if self._users[key] == 1:
            self.hold("activations", bytes)

    def _let_go(self, key: int, bytes: int) -> None:
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
            self.hold("activations", -bytes)


class _Kept:
    """A saved tensor; its storage is counted once however many ops have saved it."""

    def __init__(self, meter: Meter, tensor: Tensor) -> None:
        self.tensor = tensor
        self._meter = meter
        self._key = storage_key(tensor)
        self._bytes = tensor.untyped_storage().nbytes()
        meter._keep(self._key, self._bytes)

    def __del__(self) -> None:
        self._meter._let_go(self._key, self._bytes)


def _unpack(kept: Tensor | _Kept) -> Tensor:
    return kept.tensor if isinstance(kept, _Kept) else kept
