"""Counts the bytes a rank holds, tensor by tensor, and remembers the fullest moment of a step.

It counts what a plan predicts: tensors kept for backward, received and posted buffers, and tensors
being sent. Parameters, gradients and optimizer state do not change within a step; the owner of the
optimizer adds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autopipe.frontend.refusals import as_saved
from autopipe.ir.tensors import bytes_of
from autopipe.ir.torch_private import storage_key, version, viewed


class Meter:
    """Bytes held now, and at the peak, by stage and kind: "activations" or "transfers"."""

    def __init__(self) -> None:
        self.now: Counter[tuple[int, str]] = Counter()
        self.at_peak: Counter[tuple[int, str]] = Counter()
        self._users: Counter[int] = Counter()

    def hold(self, stage: int, kind: str, bytes: int) -> None:
        """`bytes` more (or, negative, fewer) are held by `stage` for `kind`."""
        self.now[stage, kind] += bytes
        if self.now.total() > self.at_peak.total():
            self.at_peak = self.now.copy()

    @contextmanager
    def keeping(self, stage: int, elsewhere: Iterable[Tensor]) -> Iterator[None]:
        """Within, what autograd saves counts as activations, until backward lets go of it.

        Parameters and views of them, which ZeRO-3 gathers inside, do not count.

        Args:
            elsewhere: tensors whose storages are counted elsewhere.
        """
        owned = {storage_key(tensor) for tensor in elsewhere}

        def pack(tensor: Tensor) -> Tensor | _Counted:
            if isinstance(viewed(tensor), nn.Parameter) or storage_key(tensor) in owned:
                return tensor
            return _Counted(self, stage, tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield

    def _keep(self, stage: int, key: int, bytes: int) -> None:
        self._users[key] += 1
        if self._users[key] == 1:
            self.hold(stage, "activations", bytes)

    def _let_go(self, stage: int, key: int, bytes: int) -> None:
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
            self.hold(stage, "activations", -bytes)


class _Counted:
    """A saved tensor; its storage is counted once however many ops have saved it."""

    def __init__(self, meter: Meter, stage: int, tensor: Tensor) -> None:
        # A detached alias. A saved output would hold its grad_fn, which holds this object: a cycle,
        # and `__del__` would never run.
        self.tensor, self.written = tensor.detach(), version(tensor)
        self._meter = meter
        self._stage = stage
        self._key = storage_key(tensor)
        self._bytes = bytes_of(tensor)
        meter._keep(stage, self._key, self._bytes)

    def __del__(self) -> None:
        self._meter._let_go(self._stage, self._key, self._bytes)


def _unpack(kept: Tensor | _Counted) -> Tensor:
    return as_saved(kept.tensor, kept.written) if isinstance(kept, _Counted) else kept
