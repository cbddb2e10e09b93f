"""A hash of a batch's values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from autopipe.batch.tree import Leaf


def digest(leaves: Mapping[str, Leaf], some: int | None = None) -> int:
    """A hash (63 bits) of a batch's values, to compare the batches of two ranks.

    Args:
        some: so many values of each tensor, or a few more, and none of a tensor on a GPU, whose
            kernels a copy would wait for; None: all values.
    """
    found = hashlib.blake2b(digest_size=8)
    for path, leaf in leaves.items():
        found.update(path.encode())
        if isinstance(leaf, Tensor) and some is not None and leaf.is_cuda:
            found.update(repr(leaf.shape).encode())
        elif isinstance(leaf, Tensor):
            flat = leaf.detach().cpu().resolve_conj().contiguous().flatten()
            # An odd step: one that divides a row would see the same column of each.
            picked = flat if some is None else flat[:: flat.numel() // some | 1].contiguous()
            raw = picked.view(torch.uint8)
            found.update(raw.numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return int.from_bytes(found.digest(), "big") >> 1
