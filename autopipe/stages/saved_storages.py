"""The bytes that autograd saves of a stage, counted storage by storage as they come and go."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from autopipe.ir.torch_private import storage_key

Strides = tuple[int, ...]


class SavedStorages:
    """Counts the bytes of the storages that autograd saves for one stage, while it saves them.

    Args:
        not_owned_by: tensors whose storages do not count here, since they count elsewhere.

    Attributes:
        now, most: bytes kept at this moment, and at the fullest since `most` was last set.
    """

    def __init__(self, not_owned_by: Iterable[Tensor]) -> None:
        self._sizes: dict[int, int] = {}
        self.now = self.most = 0
        # Storages are held, not keys alone: one that is gone would lend its key to another.
        self._owned = {storage_key(tensor): tensor.untyped_storage() for tensor in not_owned_by}
        self._storages: list[torch.UntypedStorage] = []
        self._users: Counter[int] = Counter()

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor for as long as the result lives, which autograd saves instead."""
        key = storage_key(tensor)
        if key in self._owned:
            return tensor
        storage = tensor.untyped_storage()
        self._storages.append(storage)
        self._sizes[key] = storage.nbytes()
        self._users[key] += 1
        if self._users[key] == 1:
            self.now += self._sizes[key]
            self.most = max(self.most, self.now)
        held = tensor.detach()
        weakref.finalize(held, self._let_go, key)
        return held

    def _let_go(self, key: int) -> None:
        self._users[key] -= 1
        if self._users[key] == 0:
            self.now -= self._sizes[key]
