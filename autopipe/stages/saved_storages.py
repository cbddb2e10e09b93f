"""The tensors that autograd saves of a stage: their bytes, counted storage by storage as they come
and go, and whether they are what they were when backward takes them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autopipe.errors import ModelError
from autopipe.frontend.refusals import as_saved
from autopipe.ir.graph import Graph, Ref, resolve
from autopipe.ir.torch_private import storage_key, version, views, writes

Strides = tuple[int, ...]


class SavedStorages:
    """Counts the bytes of the storages that autograd saves for one stage, while it saves them.

    Args:
        elsewhere: tensors whose storages are counted elsewhere.

    Attributes:
        now, most: bytes kept at this moment, and at the fullest since `most` was last set.
    """

    def __init__(self, elsewhere: Iterable[Tensor]) -> None:
        self._sizes: dict[int, int] = {}
        self.now = self.most = 0
        # Storages are held, not keys alone: one that is gone would lend its key to another.
        self._owned = {storage_key(tensor): tensor.untyped_storage() for tensor in elsewhere}
        self._storages: list[torch.UntypedStorage] = []
        self._users: Counter[int] = Counter()
        self._written = WeakTensorKeyDictionary()

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor, until the one that this returns for autograd to save is gone."""
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
        self._written[held] = version(tensor)
        weakref.finalize(held, self._let_go, key)
        return held

    def taken(self, held: Tensor) -> Tensor:
        """Check a tensor that `keep` has returned, when backward takes it.

        Raises:
            ModelError: the tensor was written in place since then.
        """
        return as_saved(held, self._written[held]) if held in self._written else held

    def _let_go(self, key: int) -> None:
        self._users[key] -= 1
        if self._users[key] == 0:
            self.now -= self._sizes[key]


@contextmanager
def naming_writes(graph: Graph) -> Iterator[None]:
    """Within, the error for a saved tensor that was written in place names the line of a write
    through `.data`, if the graph has one.

    Plain PyTorch takes such a write for none, and computes gradients from the new values.
    """
    try:
        yield
    except ModelError as error:
        place = _writes_through_data(graph)
        if not place:
            raise
        raise ModelError(
            f"{place}: x.data is written in place, and {error.message}",
            hint="compute with a new tensor: x = x.clamp(-1, 1) in the place of x.data.clamp_(-1, "
            "1); plain PyTorch computes gradients from the new values without a word",
        ) from error


def _writes_through_data(graph: Graph) -> str:
    """The line of the first write into a detached tensor that shares its memory with another."""
    detached = set[Ref]()
    for node in graph.nodes:
        op = resolve(node.op)
        first = node.args[0] if node.args else None
        if any(node.args[n] in detached for n in writes(op) if n < len(node.args)):
            return node.place
        if node.op.startswith("aten.detach.") or (views(op) and first in detached):
            detached |= {Ref(node.name, n) for n in range(len(node.outputs))}
    return ""
