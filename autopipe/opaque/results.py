"""Measure a region's results, check those of a micro-batch, and give them as stages expect them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.ir.graph import BATCH
from autopipe.ir.torch_private import is_fake, storage_key, version
from autopipe.opaque.calls.attributes import BeforeCall, read_by_others
from autopipe.opaque.calls.sites import Site, Wider, site_of
from autopipe.opaque.calls.sparse import owned
from autopipe.opaque.calls.trees import NotPlain, distinct_tensors, parts_of, to_text
from autopipe.planfile.regions import Region, Result
from autopipe.util import dims
from autopipe.util.dtypes import name_of


@cache
def _line(size: int | str) -> tuple[int, int]:
    """A size as (slope, base) of a line in the rows."""
    found = dims.parse(size)
    if isinstance(found, int):
        return 0, found
    return int(found.coeff(BATCH)), int(found.subs(BATCH, 0))


def at_rows(size: int | str, rows: Any) -> Any:
    """The size at `rows` rows, a number or a symbol of export."""
    slope, base = _line(size)
    return slope * rows + base if slope else base


def rising(small: int, large: int, rows: int) -> int | str:
    """The line through the counts of `rows` rows and of twice as many, rounded up."""
    slope = max(0, -(-(large - small) // rows))
    return in_rows(slope, max(0, small - slope * rows))


def in_rows(slope: int, base: int) -> int | str:
    """A line in the rows as text, as a plan writes a size."""
    if not slope:
        return base
    rows = "b" if slope == 1 else f"{slope}*b"
    return f"{rows} + {base}" if base > 0 else f"{rows} - {-base}" if base else rows


def in_all_runs(site: Site, tensors: Sequence[Tensor], rows: int) -> Result:
    """A result of a call on `rows` rows, on twice as many, and on other rows.

    Raises:
        Wider: its sizes depend on values, or are no line in the rows.
    """
    first, doubled, *others = tensors
    if first.ndim != doubled.ndim or any(first.shape != other.shape for other in others):
        raise Wider(site, "the sizes of what it gives depend on values")
    shape = []
    for small, large in zip(first.shape, doubled.shape, strict=True):
        slope, rest = divmod(large - small, rows)
        if rest or slope < 0:
            raise Wider(site, "the sizes of what it gives are no line in the rows")
        shape.append(in_rows(slope, small - slope * rows))
    gradient = any(tensor.requires_grad for tensor in tensors)
    return Result(tuple(shape), name_of(first.dtype), _order(first), gradient)


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dims from the slowest in memory to the fastest; in their own order if it has gaps."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    dense = tensor.permute(order).is_contiguous()
    return tuple(order if dense else range(tensor.ndim))


def inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def strides_in(order: Sequence[int], sizes: Sequence[Any]) -> list[Any]:
    """The strides of a dense tensor of such sizes, by dim; `order` has the slowest dim first."""
    strides: list[Any] = [1] * len(sizes)
    step: Any = 1
    for dim in reversed(order):
        strides[dim], step = step, step * sizes[dim]
    return strides


def as_measured(region: Region, output: Any, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
    """The tensors of a result, in new memory, in the memory order that the plan expects.

    Raises:
        ModelError: their tree, shapes or gradients are not those that were measured; or the call
            has read parameters that it did not read then.
    """
    found = distinct_tensors(output)
    if any(map(is_fake, found)):  # the copy of the model whose code runs has no weights of its own
        raise ModelError(
            f"{_subject(region)} reads parameters in this micro-batch that it has not read when it "
            "was planned",
            hint="choose among modules in the forward of a module that has all of them",
        )
    shapes = [tuple(at_rows(size, rows) for size in result.shape) for result in region.results]
    tree = to_text(parts_of(output, found))
    if (unlike := _unlike(tree, region.gives)) is not None:
        raise ModelError(
            f"{_subject(region)} gives {unlike[0]!r} beside its tensors in this micro-batch, and "
            f"{unlike[1]!r} when it was planned: what follows was traced with it",
            hint="give a tensor instead of the number, or let the same method hold what reads it",
        )
    if tree != region.gives or [tuple(tensor.shape) for tensor in found] != shapes:
        raise ModelError(
            f"{_subject(region)} gives {_shown(found)} in this micro-batch, and {shapes} when it "
            "was planned: what follows expects these",
            hint="give tensors whose sizes do not depend on values, padded for example",
        )
    taken = {storage_key(tensor) for tensor in tensors}
    results = []
    for tensor, result in zip(found, region.results, strict=True):
        results.append(_fitting(region, tensor, result, tensors, taken))
        taken.add(storage_key(results[-1]))
    return results


def check_writes(
    region: Region, taken: Sequence[tuple[Tensor, int]], states: Sequence[Tensor]
) -> None:
    """Refuse a call that has written what the graph does not know to be written.

    Args:
        taken: the tensors that the call was given, its states last, with their versions before it.
        states: the same states after it.

    Raises:
        ModelError: names the tensor that was written or replaced.
    """
    arguments = len(taken) - len(states)
    for number, (tensor, before) in enumerate(taken):
        place = number - arguments
        if version(tensor) == before and (place < 0 or states[place] is tensor):
            continue
        what = f"the argument {number}" if place < 0 else repr(region.states[place])
        raise ModelError(
            f"{_subject(region)} writes {what} in this micro-batch, and did not when it was "
            "planned: what follows was traced without it",
            hint="write it in each micro-batch, without a change where there is nothing to write",
        )


def write_back(buffer: Tensor, now: Tensor, lent: Tensor, before: int) -> None:
    """Write into a buffer what the call has left in its place.

    Args:
        now: the tensor that the copied model has there after the call.
        lent, before: the tensor that it had there before, and that tensor's version.
    """
    statistics = now is lent and version(now) == before  # as batch norm writes its statistics
    with torch.no_grad():
        (buffer.data if statistics else buffer).copy_(now)


def check_sets(
    region: Region, model: nn.Module, before: BeforeCall, given: object, loss: object
) -> None:
    """Refuse a call that has set for other code what no trace knows of.

    Args:
        model: the model whose code has run.
        before: the attributes of the region's modules before the call.
        given: the call's arguments after it, and its arguments by name.
        loss: the loss of the model, or None.

    Raises:
        ModelError: names the attribute, or says that a list or a dict that was given has changed.
    """
    what, site = "", site_of(region)
    for name in (change.name for change in before.changes()):
        if name not in (*region.sets, *region.left) and read_by_others(model, site, name, loss):
            what = f"sets {name!r}"
    try:
        known = to_text(parts_of(given, distinct_tensors(given), owned(model))) == region.given
    except NotPlain:
        known = False
    if what or not known:
        raise ModelError(
            f"{_subject(region)} {what or 'changes a list or a dict that it is given'} in this "
            "micro-batch, and did not when it was planned: the code after it was traced without",
            hint="give it back as a tensor, in each micro-batch",
        )


def _unlike(found: str, planned: str) -> tuple[Any, Any] | None:
    """The first plain values that differ in two trees of one structure, or None."""
    values, known = (list(_values(json.loads(text))) for text in (found, planned))
    if [path for path, _ in values] != [path for path, _ in known]:
        return None
    pairs = ((value, other) for (_, value), (_, other) in zip(values, known, strict=True))
    return next((pair for pair in pairs if repr(pair[0]) != repr(pair[1])), None)


def _values(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The plain values of a tree that was read from JSON, each with its path."""
    if not isinstance(tree, dict | list):
        yield path, tree
        return
    for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _values(item, f"{path}.{key}")


def _fitting(
    region: Region, tensor: Tensor, result: Result, tensors: Sequence[Tensor], taken: set[int]
) -> Tensor:
    if storage_key(tensor) in taken:
        tensor = tensor.clone()
    tensor = tensor.to(getattr(torch, result.dtype))
    dense = tensor.permute(result.order)
    if not dense.is_contiguous():
        tensor = dense.contiguous().permute(inverse(result.order))
    if tensor.requires_grad and not result.gradient:
        raise ModelError(
            f"{_subject(region)} gives a tensor with a gradient in this micro-batch, and had none "
            "when it was planned",
            hint="detach it in all cases, or in none",
        )
    carrying = [given for given in tensors if given.requires_grad]
    if torch.is_grad_enabled() and result.gradient and not tensor.requires_grad and carrying:
        return _Attached.apply(tensor, *carrying)  # type: ignore[no-untyped-call,no-any-return]
    return tensor


class _Attached(torch.autograd.Function):
    """Attaches to the inputs a result that does not depend on them: stages send it a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        ctx.others = len(others)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None,) * (1 + ctx.others)


def _subject(region: Region) -> str:
    """A region as an error names it, with the user's line that made it a region, if known."""
    place = re.match(r".+?\.py:\d+", region.why)
    return f"{f'{place.group()}: ' if place else ''}{region.name}, which runs as it is,"


def _shown(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]
