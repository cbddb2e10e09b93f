"""Find numbers that Python reads of trained weights: each update gives another one.

    x * self.alpha.item()

A run has the numbers of a first call, and a micro-batch that reads another one is refused. So the
call of the module or method that reads it runs as it is or, if none can, whoever plans is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from autopipe.errors import LaterBranch
from autopipe.ir.torch_private import is_fake
from autopipe.planfile.parts import Read

Again = Callable[..., tuple[Read, ...]]
"""Gives the reads of one more run on the same rows; takes what they are `expected` to be, and makes
an error of one that is `unlike`."""

MOST_WEIGHTS = 2**26
"""So many weights of a model are moved, its smallest tensors first: a number that forward reads is
one of them far more often than a sum over a table."""


def number_of_weights(model: nn.Module, first: Sequence[Read], again: Again, refuse: bool) -> str:
    """The words for a number that is another one as soon as trained weights are; "" if none is.

    The model's weights are left as they were, its buffers changed.

    Args:
        first: the reads of the first call.
        refuse: whether to raise the words where the number is read.

    Raises:
        LaterBranch: with the words, in the model's own code.
    """
    weights = _moved_ones(model)
    if not weights or not any(map(_is_number, first)):
        return ""
    reads: Sequence[Read] = ()
    with suppress(Exception), _updated(weights):  # whatever the user's code raises
        reads = again()
    found = [n for n, (read, later) in _pairs(first, reads) if _is_number(read) and read != later]
    steady = (pair for pair in _pairs(first, again()) if pair[0] in found) if found else ()
    for position, (read, now) in steady:
        if read != now:
            continue  # what moves it is no weight
        words = (
            f"{read.place}: Python reads the number {read.value!r} from a tensor here, which is "
            "computed of trained weights, and has another one after an update"
        )
        if refuse:
            expected = (*reads[:position], read, *reads[position + 1 :])
            with _updated(weights):
                again(expected=expected, unlike=partial(_refusal, words))
        return f"{words}: the micro-batches after it are refused in the run"
    return ""


def _is_number(read: Read) -> bool:
    return read.checked and isinstance(read.value, float)


def _pairs(
    first: Sequence[Read], second: Sequence[Read]
) -> Iterator[tuple[int, tuple[Read, Read]]]:
    """The reads of two runs at one line each, with their positions."""
    for position, (read, later) in enumerate(zip(first, second, strict=False)):
        if (read.kind, read.place) == (later.kind, later.place):
            yield position, (read, later)


def _moved_ones(model: nn.Module) -> list[Tensor]:
    """The trained weights that are moved."""
    trained = (p for p in model.parameters() if p.requires_grad and not is_fake(p))
    smallest = sorted(trained, key=Tensor.numel)
    sizes = accumulate(p.numel() for p in smallest)
    return [p for p, size in zip(smallest, sizes, strict=True) if size <= MOST_WEIGHTS]


@contextmanager
def _updated(weights: Sequence[Tensor]) -> Iterator[None]:
    """Within, weights are a little off; afterwards as before."""
    before = [p.detach().clone() for p in weights]
    try:
        with torch.no_grad():
            for parameter in weights:
                parameter.mul_(1 + 2**-7).add_(2**-10)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(weights, before, strict=True):
                parameter.copy_(value)


def _refusal(words: str, known: Read | None, found: Read) -> LaterBranch:
    hint = "compute with the tensor, not with .item() of it"
    return LaterBranch(words, hint=hint, lines=True)
