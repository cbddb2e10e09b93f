"""Batches: flatten a tree of tensors to leaves by path; describe, check and slice these leaves.

    {"ids": [8, 24], "image": {"mask": [8, 24]}}  ->  {"ids": ..., "image.mask": ...}

A batch is what `inputs(batch_size)` gives: a tuple for `model(*batch)`, a dict for
`model(**batch)`. Entries that the model's forward does not take are for the loss alone.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.frontend.row_length import at_length, length_in, length_of
from autopipe.planfile.parts import InputSpec
from autopipe.util import dims, dtypes

Leaf = Tensor | bool | int | float | str | None


def flatten(batch: object) -> dict[str, Leaf]:
    """The leaves of a batch by path, in the batch's own order.

    Raises:
        ModelError: a leaf is neither a tensor nor a Python number, text or None.
    """
    leaves: dict[str, Leaf] = {}
    for path, leaf, _ in _walk(batch):
        if not (leaf is None or isinstance(leaf, Tensor | bool | int | float | str)):
            raise ModelError(
                f"batch[{path!r}] is a {type(leaf).__name__}; a batch holds tensors, numbers, "
                "text and None in dicts, tuples and lists",
                hint=f"let inputs() give its tensors, and forward make a {type(leaf).__name__} of "
                "them",
            )
        leaves[path or "0"] = leaf
    return leaves


def _walk(
    tree: object, path: str = "", within: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """The leaves, each with its path and the kinds of the containers that it stands in."""
    if isinstance(tree, Mapping):
        kind = "numbered" if all(isinstance(key, int) for key in tree) else "dict"
        items = tree.items()
    elif isinstance(tree, Sequence) and not isinstance(tree, str):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        kind = " ".join(("named", *tree._fields)) if hasattr(tree, "_fields") else kind
        items = dict(enumerate(tree)).items()
    else:
        yield path, tree, within
        return
    for key, item in items:
        yield from _walk(item, f"{path}.{key}" if path else str(key), (*within, kind))


def rebuild(batch: object, leaves: Mapping[str, Any]) -> Any:
    """The tree of `batch` with its leaves replaced by `leaves`, which are keyed by path."""

    def walk(tree: object, path: str) -> Any:
        if isinstance(tree, Mapping):
            return {k: walk(v, f"{path}.{k}" if path else str(k)) for k, v in tree.items()}
        if isinstance(tree, Sequence) and not isinstance(tree, str):
            items = [walk(v, f"{path}.{i}" if path else str(i)) for i, v in enumerate(tree)]
            if hasattr(tree, "_fields"):  # a named tuple
                return type(tree)(*items)
            return tuple(items) if isinstance(tree, tuple) else items
        return leaves[path or "0"]

    return walk(batch, "")


def from_specs(specs: Sequence[InputSpec], rows: int) -> Any:
    """A batch of `rows` rows with the described shapes and dtypes; its values are arbitrary."""
    leaves: dict[str, Leaf] = {}
    for spec in specs:
        if spec.dtype == "python":
            leaves[spec.path] = spec.value
        else:
            shape = [dims.size_at(entry, rows) for entry in spec.shape]
            leaves[spec.path] = torch.full(shape, spec.low or 0, dtype=getattr(torch, spec.dtype))
    return of_specs(specs, leaves)


def of_specs(specs: Sequence[InputSpec], leaves: Mapping[str, Any]) -> Any:
    """A batch of this description, made of `leaves`; a user's container class becomes plain."""
    return _unflatten({spec.path: (spec.within, leaves[spec.path]) for spec in specs})


def _unflatten(leaves: Mapping[str, tuple[Sequence[str], Any]]) -> Any:
    """The tree of leaves by path, each with the kinds of its containers. A leaf without kinds is in
    containers that its path implies: a tuple where all keys are numbers, else a dict."""
    levels: dict[str, dict[str, Any]] = {}
    kind = ""
    for path, (kinds, leaf) in leaves.items():
        head, _, rest = path.partition(".")
        kind, *below = kinds or [""]
        levels.setdefault(head, {})[rest] = below, leaf
    tree = {
        head: level[""][1] if "" in level else _unflatten(level) for head, level in levels.items()
    }
    match kind.split() or ["tuple" if all(map(str.isdigit, tree)) else "dict"]:
        case ["numbered"]:
            return {int(key): item for key, item in tree.items()}
        case ["list"]:
            return [*tree.values()]
        case ["tuple"]:
            return tuple(tree.values())
        case ["named", *fields]:
            return namedtuple("Batch", fields)(*tree.values())
    return tree


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
    kinds = {path or "0": within for path, _, within in _walk(batch)}
    specs = []
    for path, leaf in leaves.items():
        spec = _describe(path, leaf, others.get(path), rows, other_rows)
        implied = tuple("tuple" if key.isdigit() else "dict" for key in path.split("."))
        specs.append(spec if kinds[path] in ((), implied) else replace(spec, within=kinds[path]))
    return specs


def _describe(path: str, leaf: Leaf, other: Leaf, rows: int, other_rows: int) -> InputSpec:
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
        low, high = int(leaf.min()), int(leaf.max())
    dtype = dtypes.name_of(leaf.dtype)
    return InputSpec(path, tuple(shape), dtype, batch_dim, low, high)


def rows_of(specs: Sequence[InputSpec], leaves: Mapping[str, Leaf]) -> int:
    """Count the rows of a batch, and check the batch against its description.

    All rows may be shorter than described, by the same number of tokens.

    Raises:
        ModelError: an entry is missing or unknown, or has another dtype, other dims or other rows;
            or rows are longer than described.
    """
    expected, found = {spec.path for spec in specs}, set(leaves)
    if expected != found:
        raise ModelError(
            f"the batch has the entries {sorted(found)}, the plan was made for {sorted(expected)}"
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


def slice_rows(
    specs: Sequence[InputSpec], leaves: Mapping[str, Leaf], start: int, stop: int
) -> dict[str, Leaf]:
    """Rows [start, stop) of every tensor with a batch dim; other leaves unchanged."""
    cut: dict[str, Leaf] = {}
    for spec in specs:
        leaf = leaves[spec.path]
        if isinstance(leaf, Tensor) and spec.batch_dim is not None:
            factor = dims.size_at(spec.shape[spec.batch_dim], 1)
            leaf = leaf.narrow(spec.batch_dim, start * factor, (stop - start) * factor)
        cut[spec.path] = leaf
    return cut


def two_rows(example: Any, specs: Sequence[InputSpec]) -> Any:
    """The first two rows of a batch, for tracing: export treats a dim of size 1 as a constant."""
    return some_rows(example, specs, 2)


def some_rows(example: Any, specs: Sequence[InputSpec], wanted: int) -> Any:
    """The first `wanted` rows of a batch; a batch with fewer rows is repeated."""
    leaves = flatten(example)
    rows = rows_of(specs, leaves)
    times = -(-wanted // rows)
    if times > 1:
        leaves = {
            spec.path: torch.cat([leaf] * times, spec.batch_dim)
            if isinstance(leaf := leaves[spec.path], Tensor) and spec.batch_dim is not None
            else leaf
            for spec in specs
        }
    return rebuild(example, slice_rows(specs, leaves, 0, wanted))


def fingerprint(leaves: Mapping[str, Leaf], some: int | None = None) -> int:
    """A hash (63 bits) of a batch's values, to compare the batches of two ranks.

    Args:
        some: so many values of each tensor, or a few more, and none of a tensor on a GPU, whose
            kernels a copy would wait for; None: all values.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path, leaf in leaves.items():
        digest.update(path.encode())
        if isinstance(leaf, Tensor) and some is not None and leaf.is_cuda:
            digest.update(repr(leaf.shape).encode())
        elif isinstance(leaf, Tensor):
            flat = leaf.detach().cpu().contiguous().flatten()
            # An odd step: one that divides a row would see the same column of each.
            picked = flat if some is None else flat[:: flat.numel() // some | 1].contiguous()
            raw = picked.view(torch.uint8)
            digest.update(raw.numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return int.from_bytes(digest.digest(), "big") >> 1


def bind(
    model: nn.Module, batch: Any, loss: Callable[..., Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Find the arguments of the model's forward in `batch`.

    With a loss, entries without a parameter in forward are left for the loss.

    Raises:
        ModelError: forward needs an argument that the batch lacks; or, without a loss, the batch
            has an entry that forward does not take.
    """
    signature = inspect.signature(model.forward)
    parameters = signature.parameters.values()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        extra = [] if takes_all else [key for key in batch if key not in signature.parameters]
        kwargs = {key: item for key, item in batch.items() if key not in extra}
    else:
        args = tuple(batch) if isinstance(batch, Sequence) else (batch,)
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        extra = [] if takes_all else [str(i) for i in range(len(positional), len(args))]
        args = args[: len(args) - len(extra)]
    called = f"{type(model).__name__}.forward{signature}"
    if extra and loss is None:
        raise ModelError(
            f"inputs do not fit the model: {called} takes no {', '.join(extra)}, and there is no "
            "loss(outputs, batch) that could read it"
        )
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = list(batch) if isinstance(batch, Mapping) else f"{len(args)} positional"
        raise ModelError(
            f"inputs do not fit the model: {called} called with {given}: {error}"
        ) from error
    return args, kwargs
