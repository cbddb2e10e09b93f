"""What the leaves of a batch are: shapes, dtypes, which dim holds the rows; and batches checked
against it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autopipe.batch.row_length import at_length, length_in, length_of
from autopipe.batch.tree import Leaf, flatten, walk
from autopipe.errors import ModelError
from autopipe.planfile.parts import InputSpec
from autopipe.util import dims, dtypes


def describe(batch: object, other: object | None, rows: int, other_rows: int) -> list[InputSpec]:
    """Describe the leaves of a batch of `rows` rows.

    With `other`, a batch of `other_rows` rows, a dim whose size differs between the two is a batch
    dim: a size that goes from 2 k to 3 k when the rows go from 2 to 3 is `k*b`. Without `other`,
    the first dim of a tensor is its batch dim if its size is `rows`.
    """
    leaves, others = flatten(batch), flatten(other) if other is not None else {}
    if other is not None and list(leaves) != list(others):
        raise ModelError(
            f"inputs({rows}) has the entries {list(leaves)}, inputs({other_rows}) has "
            f"{list(others)}: they must be the same",
            hint="a list with an entry for each row cannot be cut: make it a tensor, or leave it "
            "out, also of what batches() gives"
            if len(leaves) != len(others)
            else None,
        )
    kinds = {path or "0": within for path, _, within in walk(batch)}
    specs = []
    for path, leaf in leaves.items():
        spec = _describe(path, leaf, others.get(path), rows, other_rows)
        implied = tuple("tuple" if key.isdigit() else "dict" for key in path.split("."))
        specs.append(spec if kinds[path] in ((), implied) else replace(spec, within=kinds[path]))
    return specs


def _describe(path: str, leaf: Leaf, other: Leaf, rows: int, other_rows: int) -> InputSpec:
    if isinstance(leaf, float) and not math.isfinite(leaf):
        raise ModelError(
            f"inputs({rows})[{path!r}] is {leaf}, and a plan holds finite numbers alone",
            hint=f"give a tensor of no dims, torch.tensor(float('{leaf}')), or let forward have it",
        )
    if not isinstance(leaf, Tensor):
        return InputSpec(path, (), "python", None, value=leaf)
    if leaf.layout != torch.strided:
        raise ModelError(
            f"inputs({rows})[{path!r}] is of layout {str(leaf.layout).removeprefix('torch.')}, and "
            "no rows can be cut from it for micro-batches",
            hint="give its indices and values; or, if it is the same for all rows, let the model "
            "keep it: register_buffer(name, tensor, persistent=False)",
        )
    shape: list[int | str] = list(leaf.shape)
    batch_dim: int | None = None
    if isinstance(other, Tensor):
        if other.ndim != leaf.ndim:
            raise ModelError(
                f"inputs({rows})[{path!r}] has {leaf.ndim} dims, inputs({other_rows}) {other.ndim}"
            )
        for dim, (size, other_size) in enumerate(zip(leaf.shape, other.shape, strict=True)):
            if size == other_size:
                continue
            factor = size // rows
            if size != factor * rows or other_size != factor * other_rows or batch_dim is not None:
                raise ModelError(
                    f"inputs({rows})[{path!r}] has the shape {tuple(leaf.shape)}, "
                    f"inputs({other_rows})[{path!r}] {tuple(other.shape)}: one dim must grow in "
                    "proportion to the rows and the others stay",
                    hint="pad to one length",
                )
            shape[dim] = "b" if factor == 1 else f"{factor}*b"
            batch_dim = dim
    elif leaf.ndim and leaf.shape[0] == rows:
        shape[0], batch_dim = "b", 0
    low = high = None
    if not leaf.dtype.is_floating_point and not leaf.dtype.is_complex and leaf.numel():
        whole = leaf.long()  # torch has no least of unsigned numbers of 16 bits and more
        low, high = int(whole.min()), int(whole.max())
    dtype = dtypes.name_of(leaf.dtype)
    return InputSpec(path, tuple(shape), dtype, batch_dim, low, high)


def count_rows(specs: Sequence[InputSpec], leaves: Mapping[str, Leaf]) -> int:
    """Count the rows of a batch, and check the batch against its description.

    All rows may be shorter than described, by the same number of tokens.

    Raises:
        ModelError: an entry is missing or unknown, or has another dtype, other dims or other rows;
            or rows are longer than described.
    """
    expected, found = {spec.path for spec in specs}, set(leaves)
    if expected != found:
        raise ModelError(
            f"the batch has the entries {sorted(found)}, the plan was made for {sorted(expected)}",
            hint="batches() gives what inputs() does: the same entries, in a dict or in a tuple",
        )
    length, longest = length_in(specs, leaves), length_of(specs)
    if length is not None and longest is not None and length > longest:
        raise ModelError(
            f"the batch has rows of {length} tokens, and memory is planned for rows of at most "
            f"{longest}",
            hint=f"plan again with rows of {length} tokens from inputs(), or cut the rows",
        )
    specs = specs if length is None else at_length(specs, length)
    rows: int | None = None
    for spec in specs:
        leaf = leaves[spec.path]
        if spec.dtype == "python":
            if isinstance(leaf, Tensor) or leaf != spec.value:
                given = repr(leaf)
                if isinstance(leaf, Tensor) and leaf.numel() > 1:
                    given = f"a tensor of shape {[*leaf.shape]}"
                raise ModelError(
                    f"batch[{spec.path!r}] is {given}; the plan was made with {spec.value!r}, "
                    "which the traced graph holds as a constant",
                    hint="what changes from step to step is a tensor of no dims: "
                    f"torch.tensor({leaf!r})"
                    if type(leaf) in (int, float)
                    else None,
                )
            continue
        described = f"{spec.dtype}[{', '.join(map(str, spec.shape))}]"
        if not isinstance(leaf, Tensor):
            raise ModelError(f"batch[{spec.path!r}] is {leaf!r}, not a tensor {described}")
        given = f"{dtypes.name_of(leaf.dtype)}{list(leaf.shape)}"
        refusal = ModelError(
            f"batch[{spec.path!r}] is {given}; the plan was made for {described}"
            + (f" with b = {rows} as in the entries before it" if rows is not None else "")
        )
        if dtypes.name_of(leaf.dtype) != spec.dtype or leaf.ndim != len(spec.shape):
            raise refusal
        if rows is None and spec.batch_dim is not None:
            rows = leaf.shape[spec.batch_dim] // dims.size_at(spec.shape[spec.batch_dim], 1)
        if any(
            size != dims.size_at(entry, rows or 1)
            for size, entry in zip(leaf.shape, spec.shape, strict=True)
        ):
            raise refusal
    if rows is None:
        raise ModelError(
            "no entry of the batch has a batch dim, so it cannot be cut into rows",
            hint="def inputs(batch_size): a tensor of it has batch_size rows, "
            "as torch.randn(batch_size, 8) has",
        )
    return rows
