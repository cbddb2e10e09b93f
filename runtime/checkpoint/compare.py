"""Compares two checkpoints, which may be of different plans, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from autopipe.runtime.checkpoint.layout import REPLICA
from autopipe.runtime.checkpoint.stored import Stored
from autopipe.runtime.checkpoint.whole import WholeTensor, tensors, windows
from autopipe.util.progress import phase


def differences(one: Stored, other: Stored) -> Iterator[str]:
    """A sentence for each tensor of the model or the optimizer that differs, or that one lacks.

    Values of a tensor in a replica other than the first are compared if both checkpoints have that
    replica.
    """
    ours, theirs = ({tensor.key: tensor for tensor in tensors(each)} for each in (one, other))
    for mine, others in ((ours, theirs), (theirs, ours)):
        for key in [key for key, tensor in mine.items() if tensor.kind == REPLICA]:
            if key not in others:
                del mine[key]
    if one.step != other.step:
        yield f"the step is {one.step} and {other.step}"
    with phase("comparing", of=len(ours | theirs)) as done:
        for key in {**ours, **theirs}:
            difference = _difference(one, ours.get(key), other, theirs.get(key))
            if difference is not None:
                yield f"{key}: {difference}"
            done()


def _difference(
    one: Stored, mine: WholeTensor | None, other: Stored, theirs: WholeTensor | None
) -> str | None:
    if mine is None or theirs is None:
        return f"only in {(one if theirs is None else other).folder}"
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return (
            f"{mine.dtype} {list(mine.shape)} in the first, {theirs.dtype} {list(theirs.shape)} "
            "in the second"
        )
    differing, first, begins = 0, None, 0
    for a, b in zip(windows(one, mine), windows(other, theirs), strict=True):
        if not a.numel():
            continue
        differing_rows = (_bits(a) != _bits(b)).view(a.numel(), -1).any(1).nonzero().flatten()
        if len(differing_rows) and first is None:
            first = begins + int(differing_rows[0])
        differing += len(differing_rows)
        begins += a.numel()
    return None if first is None else f"{differing} of {begins} elements differ, from {first} on"


def _bits(tensor: Tensor) -> Tensor:
    """A tensor's bits, as integers: with them nan equals itself, and -0 differs from 0."""
    return tensor.reshape(-1).view(torch.uint8)
