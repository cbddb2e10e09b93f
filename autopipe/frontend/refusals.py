"""The errors for a model that cannot be traced, each with the user's line and a hint.

raised by the model's own code      it fails on two rows, and would without autopipe
raised by a step of the model       no rank could train on the batch
rows fixed to one number            the line that fixes it
anything else during the trace      the line, and that values are not known there
"""

from __future__ import annotations

import inspect
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import takewhile
from types import FrameType
from typing import Any

from torch import Tensor, nn

from autopipe.errors import CaptureError, ModelError, RowsFixed, SizesByValues, Uncaptured
from autopipe.frontend import user_lines
from autopipe.frontend.loss import of_targets
from autopipe.ir.torch_private import DynamicOutputShapeException, version


def depends_on_values(place: str, module: str = "") -> Uncaptured:
    """The error for a tensor whose size depends on values of the batch, made in a module."""
    return SizesByValues(
        f"{place}: a size here depends on the values of a tensor, so the stages cannot know what "
        "they will receive",
        hint="pad to a fixed size, or mask with torch.where; int(k) of a tensor k that holds the "
        "same number in every batch is a size",
        module=module,
        lines=True,
    )


def takes_a_number(place: str, module: str = "") -> Uncaptured:
    """The error for an op of torch that reads a tensor as its index, size or factor."""
    return Uncaptured(
        f"{place}: torch takes a number from a tensor here, and a graph has one for good",
        hint="int(k) or float(k) of a tensor k that holds the same number in every batch; of "
        "others ops of tensors: x[k.reshape(1)][0], x * k, F.one_hot(k, num_classes)",
        module=module,
        lines=True,
    )


def of_its_own(
    error: Exception, loss: Callable[..., Any] | None, entries: str, low: str = ""
) -> CaptureError:
    """The error for a model or a loss that raises an exception of its own.

    Args:
        entries: the paths of the batch's leaves.
        low: the dtype of 16 bits in which it runs; "": none.
    """
    if isinstance(error, DynamicOutputShapeException):
        return depends_on_values(user_lines.of_error(error))
    if any(words in str(error) for words in ("FakeTensor", "tensor subclasses")):
        return in_a_trace(error, loss)
    in_loss = _passes(error, loss)
    whose, call = (
        ("loss(outputs, batch)", "loss(model(**inputs(2)), inputs(2))")
        if in_loss
        else ("the model", "model(**inputs(2))")
    )
    if isinstance(error, KeyError):
        hint = f"the batch has the entries {entries}"
    else:
        hint = f"does {call} go well by itself?"
        if in_loss and isinstance(error, TypeError):
            hint = of_targets(loss, entries) or hint
        elif isinstance(error, TypeError) and "unexpected keyword" in str(error):
            hint += f" A forward that takes **kwargs is given all entries of the batch: {entries}"
        if low:
            hint += (
                f" Parameters and activations are of {low} here, and buffers as they were built: "
                "self.table.to(x.dtype) where the two meet, or --precision fp32"
            )
    return CaptureError(
        f"{_at(error)}{whose} raises {_message(error)} (it is traced with two rows)", hint=hint
    )


_DTYPES_DIFFER = re.compile(
    "the same dtype|expected scalar type|type .* should be the same|dtypes match|Found dtype|"
    "can't be cast to"
)
"""What torch says of dtypes that do not go together. Tensors without memory pass most of it."""


def dtypes_differ(error: Exception) -> bool:
    """Whether an error says that dtypes do not go together."""
    return _DTYPES_DIFFER.search(str(error)) is not None


def on_every_rank(error: Exception, *, cpu: bool = False) -> ModelError | None:
    """The error for a model whose own step fails on every rank, from the exception of that step;
    None: a rank may have a kernel that this processor lacks.

    Args:
        cpu: whether ranks run on processors too.
    """
    message = f"{_at(error)}on a batch as `inputs` gives it, the model raises {_message(error)}"
    if isinstance(error, IndexError):
        hint = (
            "a token, a label, or a position in a long row is beyond the table it is looked up in"
        )
        if "out of bounds for dimension 0" in str(error):
            hint += (
                "; or the batch numbers its own rows, as the edges of graphs do: a micro-batch has "
                "some of them, so give each graph as a row, and number its nodes from 0"
            )
        return ModelError(message, hint=hint)
    if dtypes_differ(error):
        cast = "cast what `inputs` gives, or where the two meet: x.to(self.weight.dtype)"
        return ModelError(message, hint=cast)
    if cpu and "not implemented for" in str(error):
        return ModelError(
            message, hint="--precision fp32, or a cluster of GPUs that have the kernel"
        )
    if "modified by an inplace operation" in str(error):
        return written_over(str(error).partition(" Hint:")[0])
    return None


def on_later_rows(error: Exception) -> ModelError:
    """The error for a model that takes the first rows of a batch by themselves, and fails on the
    next rows by themselves, from its exception there."""
    return ModelError(
        f"{_at(error)}on rows 2 and 3 of a batch by themselves the model raises {_message(error)}; "
        "on rows 0 and 1 it does not. Each micro-batch is computed by itself",
        hint="the batch may number its own rows, as the offsets of an EmbeddingBag do: let each "
        "row stand by itself, as indices of two dims do; --micro-batches 1 --dp 1 leaves the batch "
        "whole",
    )


def fails_by_itself(error: Exception) -> ModelError:
    """The error for a model that plain PyTorch cannot train on a batch, from its exception."""
    return on_every_rank(error, cpu=True) or ModelError(
        f"{_at(error)}in plain PyTorch too the model raises {_message(error)}",
        hint="does a step of it go well in one process, on all rows of inputs(batch size)?",
    )


def written_over(what: str) -> ModelError:
    """The error for a tensor that was saved for backward and then written in place."""
    return ModelError(
        f"the model or its loss writes in place over a tensor that backward needs: {what}",
        hint="make a new tensor there: x = x + y, and not x.add_(y) or x += y; loss.backward() "
        "under torch.autograd.detect_anomaly() shows the line that made what is written over",
    )


def as_saved(tensor: Tensor, written: int) -> Tensor:
    """A tensor that was saved through hooks, checked here since torch does not check its version.

    Args:
        tensor: the saved tensor, or an alias by `detach`.
        written: its `version` when it was saved.

    Raises:
        ModelError: the tensor was written in place since.
    """
    if version(tensor) != written:
        raise written_over(
            f"one of {list(tensor.shape)} is at version {version(tensor)}; expected version "
            f"{written} instead."
        )
    return tensor


def in_a_trace(error: Exception, loss: Callable[..., Any] | None) -> CaptureError:
    """The error for code that runs on real tensors and fails on a trace's tensors."""
    if isinstance(error, DynamicOutputShapeException):
        return depends_on_values(user_lines.of_error(error))
    outside = _OUTSIDE.search(str(error))
    if outside is not None:
        part = outside[1].rpartition(".")[0].removeprefix("model").lstrip(".")
        return CaptureError(
            f"{part or 'the model'} computes with a tensor that is none of the model's parameters "
            "and buffers: that of a module in a plain list or dict, which torch does not know "
            "either, or one that was computed from parameters and kept",
            hint="nn.ModuleList, nn.ModuleDict, nn.ParameterList and register_buffer make them the "
            "model's",
        )
    hidden = _HIDDEN.match(str(error))
    if hidden is not None:
        return CaptureError(
            f"the model has a module {hidden[1]!r}, whose name is that of a method of nn.Module: "
            "torch.export finds the method there",
            hint="give the module another name",
        )
    whose = "loss(outputs, batch)" if _passes(error, loss) else "the model"
    return Uncaptured(
        f"{_at(error)}{whose} cannot be captured: {_message(error)}",
        hint="while a model is captured its tensors have shapes and no values: nothing outside "
        "torch can compute with them",
        lines=True,
    )


_HIDDEN = re.compile(r"submodule `model\.([\w.]+)`: <bound method ")
"""What torch says of a module that an attribute of its class hides."""

_OUTSIDE = re.compile(r"a fake tensor in the exported program const.* attribute: ([\w.]+)\.", re.S)
"""What export says of a constant that has no values."""


LIFTED = "a fake tensor in the exported program constant's list"
"""Export's message for a parameter, or a tensor made from one, that the model does not register."""


def kept_outside(names: Sequence[str]) -> CaptureError:
    """The error for parameters that a model reads from places where they are not registered."""
    return CaptureError(
        f"the model keeps parameters, or what it has made of them, in {', '.join(names)}, which is "
        "outside of its own parameters and buffers, and computes with them",
        hint="read a parameter where it is registered, self.layer.weight; and register a copy as a "
        "buffer: self.register_buffer(name, p.detach().clone())",
    )


def fixes_rows(error: Exception) -> bool:
    """Whether export reports that a trace is valid only for some numbers of rows."""
    beyond = "Expected op to be '=='"  # where the most rows are no whole number: rows <= 25/6
    return any(words in str(error) for words in ("Constraints violated", beyond))


def fixed_rows(run: Callable[[], object], model: nn.Module, *, lines: bool) -> RowsFixed:
    """The error for a trace, made by `run`, that is valid only for some numbers of rows; it names
    the line, or the module.

    Args:
        lines: whether lines around that one may run as they are.
    """
    place, frames = _line_that_fixes_rows(run, model)
    return RowsFixed(
        f"{place + ': t' if place else 't'}he number of rows is fixed here, so what is traced with "
        "two rows does not hold for the rows of every micro-batch",
        hint="take the rows from x.shape[0], not from a number, as in view(2, -1), nor as "
        "int(x.shape[0]); no branch may depend on them",
        frames=frames,
        lines=lines,
    )


class _Conditions(logging.Handler):
    """Records the user's line at each condition on sizes that a trace depends on.

    Args:
        caller: the frame that makes the trace: a line above it is no line of the model.
    """

    def __init__(self, model: nn.Module, caller: FrameType | None) -> None:
        super().__init__(logging.INFO)
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._caller = caller
        self.found: list[tuple[str, str, list[tuple[FrameType, int]]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note the user's line, which is on the stack, or else the module that runs."""
        frames = [*traceback.walk_stack(None)]
        place = user_lines.here(within=self._caller) or self._module(frames)
        self.found.append((record.getMessage(), place, frames[::-1]))

    def _module(self, frames: Iterable[tuple[FrameType, int]]) -> str:
        """The path of the innermost module that runs, all of whose code is torch's; "": none."""
        for frame, _ in takewhile(lambda pair: pair[0] is not self._caller, frames):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and (path := self._paths.get(id(module))) is not None:
                return f"{path or 'the model'} ({type(module).__name__})"
        return ""


def _line_that_fixes_rows(
    run: Callable[[], object], model: nn.Module
) -> tuple[str, Sequence[tuple[FrameType, int]]]:
    """The user's line, or else the module of the model, at which the trace made by `run` fixes the
    number of rows ("" if unknown), and the frames there, each with its line.

    torch logs each condition on sizes: a number that replaces the symbol, or a remainder that must
    be 0.
    """
    log, conditions = logging.getLogger(_SIZES), _Conditions(model, inspect.currentframe())
    before = log.level, log.propagate, log.disabled, log.handlers
    silenced = log.manager.disable  # by a program that wants to hear nothing
    logging.disable(logging.NOTSET)
    log.handlers = [conditions]
    log.propagate, log.disabled = False, False
    log.setLevel(logging.INFO)
    try:
        with suppress(Exception):  # it is known to fail
            run()
    finally:
        logging.disable(silenced)
        log.setLevel(before[0])
        log.propagate, log.disabled, log.handlers = before[1:]
    for pattern in _FIXING:
        for condition, place, frames in conditions.found:
            if pattern.match(condition) and "suppressed" not in condition and place:
                return place, frames
    return "", ()


_FIXING = tuple(
    map(re.compile, (r"set_replacement \S+ = \d", r"eval Eq\(Mod\(", r"eval \S+ <=? \d", "eval "))
)
"""What it says of a condition, the likeliest to fix the rows first."""


def reason(error: Exception) -> str:
    """An exception's message as one line, with the user's place."""
    place = user_lines.of_error(error)
    return _message(error) + (f" at {place}" if place else "")


_SIZES = "torch.fx.experimental.symbolic_shapes"
"""The name of torch's log of conditions on sizes."""


def _passes(error: Exception, function: Callable[..., Any] | None) -> bool:
    called = type(function).forward if isinstance(function, nn.Module) else function
    code = getattr(called, "__code__", None)
    frames: Iterable[Any] = traceback.walk_tb(error.__traceback__)
    return code is not None and any(frame.f_code is code for frame, _ in frames)


def _at(error: Exception) -> str:
    place = user_lines.of_error(error)
    return f"{place}: " if place else ""


def _message(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
