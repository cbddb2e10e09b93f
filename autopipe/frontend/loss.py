"""Find the loss in the result of a model or of a loss function: a scalar, or a sum and a count.

    a scalar tensor                        a mean over the rows of its micro-batch
    SumCount(sum, count)                   a sum, divided by the count of the whole batch
    (scalar, integers counted)             the same: a tensor of integers without gradient, an int
    forward's (scalar, tensors ...)        the scalar: a loss and what it was made from
    an object or a dict with a loss        its loss

Any other pair is ambiguous and refused: dividing one by the other might change the user's loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.fx.traceback
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.frontend.user_lines import begins, codes_in
from autopipe.ir.dataflow import gradient_values
from autopipe.ir.graph import Graph, Ref
from autopipe.util import dtypes

Loss = Callable[[Any, Any], Any]

EXPECTED = "a loss is a scalar tensor or autopipe.SumCount(sum, count)"


class SumCount(NamedTuple):
    """A loss that is `sum / count` over the whole batch, however it is cut into micro-batches.

    A mean over tokens needs it if rows have different numbers of tokens. `sum` is a scalar tensor,
    `count` a scalar tensor, an int or a float; the count carries no gradient.
    """

    sum: Tensor
    count: Any


def check_arguments(loss: Loss | None) -> None:
    """Refuse a loss that cannot be called as `loss(outputs, batch)`.

    Raises:
        ModelError: names what it takes.
    """
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise ModelError(
            f"loss is the class {loss.__name__}, and not an object of it",
            hint=f"loss = {loss.__name__}(), if it takes the model's outputs and the whole batch; "
            f"or def loss(outputs, batch): return {loss.__name__}()(outputs, batch['y'])",
        )
    try:
        signature = inspect.signature(loss) if loss is not None else None
    except (TypeError, ValueError):  # one written in C does not always say
        return
    try:
        if signature is not None:
            signature.bind("outputs", "batch")
    except TypeError as error:
        place, name = begins(loss), getattr(loss, "__name__", type(loss).__name__)
        raise ModelError(
            f"{place + ': ' if place else ''}{name}{signature} is called with the model's outputs "
            f"and the whole batch: {error}",
            hint="def loss(outputs, batch): batch is what inputs(batch_size) gives",
        ) from error


def of_targets(loss: Loss | None, entries: str) -> str | None:
    """The hint for a loss of torch itself, which takes targets; None: the loss is a user's.

    Args:
        entries: the paths of the batch's leaves; the targets come last.
    """
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    if not str(getattr(kind, "__module__", "")).startswith("torch.nn."):
        return None
    last = entries.rpartition(", ")[2].partition(".")[0]
    key = last if last.isdigit() else repr(last)
    return (
        f"a loss is given the whole batch ({entries}), and torch's takes its targets: "
        f"def loss(outputs, batch): return criterion(outputs, batch[{key}])"
    )


def outputs_to_loss(
    outputs: Any, batch: Any, loss: Loss | None, model: nn.Module | None = None
) -> Tensor | SumCount:
    """Read the loss of a micro-batch by the table above; a count is returned as a scalar tensor.

    Args:
        loss: the user's `loss(outputs, batch)`; None: the outputs contain the loss.
        model: the module that made the outputs; an error names its line.

    Raises:
        ModelError: the result is neither a scalar tensor nor a sum and a count, or is ambiguous.
    """
    if loss is not None:
        return _read(loss(outputs, batch), "loss(outputs, batch)", begins(loss), None)
    value = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    value = getattr(value, "loss", value)
    if isinstance(value, tuple | list) and len(value) > 1 and not _counted(value):
        first, *others = value
        if _is_scalar(first) and not any(_is_figure(other) for other in others):
            value = first
    place = begins(type(model).forward) if model is not None else ""
    return _read(value, "the model", place, "give a loss(outputs, batch) function")


def _read(value: Any, whose: str, place: str, hint: str | None) -> Tensor | SumCount:
    whose = f"{place}: {whose}" if place else whose
    if _is_scalar(value):
        loss: Tensor = value
        return loss
    value = counted_by_tensor(value)
    if isinstance(value, SumCount):
        return value
    if isinstance(value, tuple | list) and len(value) > 1 and _is_scalar(value[0]):
        things = ", ".join(_described(item) for item in value)
        raise ModelError(
            f"{whose} gives {len(value)} things ({things}): as a sum and a count? as a loss "
            "and a figure to look at?",
            hint="return the one scalar that is to be minimised, or "
            "autopipe.SumCount(total, count)",
        )
    raise ModelError(f"{whose} gives {_described(value)}; {EXPECTED}", hint=hint or _way_out(value))


def _way_out(value: Any) -> str:
    """The hint for a result that is no loss."""
    if isinstance(value, Tensor):
        return "return its mean over the rows: .mean()"
    if isinstance(value, int | float):
        return "return the tensor itself, without .item() or float()"
    return "does it end without a `return`?" if value is None else "return the scalar tensor alone"


def _counted(value: Any) -> bool:
    """Whether a value is a sum and a count."""
    if not isinstance(value, tuple | list) or len(value) != 2 or not _is_scalar(value[0]):
        return False
    count = value[1]
    if isinstance(count, bool | torch.SymBool):
        return False
    if isinstance(value, SumCount):
        return _is_scalar(count) or isinstance(count, int | float | torch.SymInt | torch.SymFloat)
    return isinstance(count, int | torch.SymInt) or (_is_scalar(count) and _is_integer(count))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_integer(value: Tensor) -> bool:
    kind = value.dtype
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


def _is_figure(value: Any) -> bool:
    """Whether a value beside a loss is a single number, such as an accuracy or a second loss."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def counted_by_tensor(value: Any) -> Any:
    """A sum and a count as a `SumCount` of two scalar tensors; another value as it is."""
    return SumCount(value[0], _as_tensor(value[1], value[0])) if _counted(value) else value


def _as_tensor(count: Any, beside: Tensor) -> Tensor:
    if isinstance(count, Tensor):
        return count.detach() if count.requires_grad else count
    dtype = torch.int64 if isinstance(count, int | torch.SymInt) else torch.float64
    return torch.full((), count, dtype=dtype, device=beside.device)


def _described(value: Any) -> str:
    if _is_scalar(value):
        return f"a scalar of {dtypes.name_of(value.dtype)}"
    if isinstance(value, Tensor):
        return f"a tensor of shape ({', '.join(map(_size, value.shape))})"
    name = value.__class__.__name__  # a number that is read while one looks says what it is
    article = "an" if name[0].lower() in "aeio" else "a"
    return "nothing" if value is None else f"{article} {name}"


def _size(size: int | torch.SymInt) -> str:
    return str(size) if isinstance(size, int) else "rows"


def plain_tree(outputs: Any) -> Any:
    """A model's output as a tree of dicts, tuples and tensors; other objects are left out."""
    if is_dataclass(outputs) and not isinstance(outputs, Mapping | type):
        outputs = {f.name: getattr(outputs, f.name) for f in fields(outputs)}
    if isinstance(outputs, Mapping):
        return {key: plain_tree(item) for key, item in outputs.items()}
    if isinstance(outputs, tuple | list):
        return tuple(map(plain_tree, outputs))
    return outputs if isinstance(outputs, Tensor) else None


def used_by(loss: object) -> Iterator[object]:
    """A loss, and the functions and modules that it uses: those of its file, and those it holds.

    criterion = Criterion()
    loss = lambda outputs, batch: criterion(outputs, batch["y"])      the function, the module
    loss = partial(with_margin, criterion)                            both
    """
    pending, seen = [loss], dict[int, object]()
    while pending:
        used = pending.pop()
        if id(used) in seen:
            continue
        seen[id(used)] = used
        if isinstance(used, partial):
            pending += [used.func, *used.args, *used.keywords.values()]
        elif isinstance(used, MethodType):
            pending += [used.__func__, used.__self__]
        elif isinstance(used, FunctionType):
            pending += _named_in(used)
    yield from seen.values()


def note_lines(loss: Loss | None) -> None:
    """Have torch.export note the lines of a loss, and of functions of its file that it calls.

    By itself export notes lines only in functions named `forward`. `annotate_fn` adds others;
    that of torch 2.11 and 2.12 does not.
    """
    annotate = getattr(torch.fx.traceback, "annotate_fn", None)
    called = inspect.getattr_static(type(loss), "__call__", None)  # of an object of a user's class
    for function in (*used_by(loss), called):
        if annotate is not None and isinstance(function, FunctionType):
            annotate({})(function)


def named_by(function: FunctionType) -> list[object]:
    """The values that a function's code names among the globals of its file, or closes over."""
    names = dict.fromkeys(n for code in codes_in(function.__code__) for n in code.co_names)
    named = [function.__globals__[name] for name in names if name in function.__globals__]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing in it yet
            named.append(cell.cell_contents)
    return named


def _named_in(function: FunctionType) -> list[object]:
    """The modules and functions of one file that a function closes over or names."""
    home = function.__module__
    return [
        value
        for value in named_by(function)
        if isinstance(value, nn.Module | partial | MethodType)
        or (isinstance(value, FunctionType) and value.__module__ == home)
    ]


def check_trained(graph: Graph) -> None:
    """Refuse a loss that trains nothing: torch itself refuses its backward.

    Raises:
        ModelError: names the last op that has a gradient.
    """
    carrying = gradient_values(graph)
    if graph.outputs[0] in carrying:
        return
    ends = [
        node
        for node in graph.nodes
        if any(value in carrying for value in node.values())
        and not any(Ref(node.name, n) in carrying for n in range(len(node.outputs)))
    ]
    if not ends:
        raise ModelError(
            "no parameter that is trained goes into the loss: nothing would be trained",
            hint="parameter.requires_grad_(True) where the model is built",
        )
    end = ends[-1]
    raise ModelError(
        f"{end.place or end.name}: no gradient comes through {end.short}() here, and the loss has "
        "none: nothing would be trained",
        hint="compute the loss without .detach(), torch.no_grad(), argmax, or comparing",
    )
