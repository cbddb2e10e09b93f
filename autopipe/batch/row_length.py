"""How long the rows of a batch are: the tokens of a sequence, whose number may change.

[input_ids 8 x 128, labels 8 x 128]      length_of: 128
                                         lengthened: 8 x s, 8 x s
                                         at_length(64): 8 x 64, 8 x 64
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from autopipe.ir.graph import SEQUENCE
from autopipe.planfile.parts import InputSpec
from autopipe.util import dims

SHORTEST = 8
"""The fewest tokens of a row for a sequence whose length may change."""


def _of_tokens(specs: Sequence[InputSpec]) -> tuple[InputSpec, int] | None:
    """The first two-dim tensor of whole numbers in a batch, and the dim beside its rows."""
    for spec in specs:
        if spec.batch_dim is not None and len(spec.shape) == 2 and spec.low is not None:
            size = spec.shape[1 - spec.batch_dim]
            if isinstance(size, int) and size >= SHORTEST:
                return spec, 1 - spec.batch_dim
    return None


def length_of(specs: Sequence[InputSpec]) -> int | None:
    """Tokens of a row in a batch; None if no dim looks like a sequence."""
    found = _of_tokens(specs)
    return None if found is None else dims.size_at(found[0].shape[found[1]], 1)


def length_in(specs: Sequence[InputSpec], leaves: Mapping[str, Any]) -> int | None:
    """Tokens of a row in a batch of this description, whatever its length; None: no sequence."""
    found = _of_tokens(specs)
    if found is None:
        return None
    leaf = leaves.get(found[0].path)
    return leaf.shape[found[1]] if isinstance(leaf, Tensor) and leaf.ndim == 2 else None


def lengthened(specs: Sequence[InputSpec], length: int) -> list[InputSpec]:
    """The description of a batch with `s` in place of its sequence dims of size `length`."""

    def entry(spec: InputSpec, number: int, size: int | str) -> int | str:
        follows_rows = spec.batch_dim is not None and number == spec.batch_dim + 1
        integral = spec.dtype == "bool" or spec.low is not None
        return str(SEQUENCE) if size == length and (integral or follows_rows) else size

    return [
        replace(spec, shape=tuple(entry(spec, n, size) for n, size in enumerate(spec.shape)))
        for spec in specs
    ]


def at_length(specs: Sequence[InputSpec], length: int) -> Sequence[InputSpec]:
    """The description of a batch whose rows have `length` tokens, from that of longer ones."""
    longest = length_of(specs)
    if longest is None or length == longest:
        return specs
    return [
        replace(
            spec, shape=tuple(length if entry == str(SEQUENCE) else entry for entry in spec.shape)
        )
        for spec in lengthened(specs, longest)
    ]
