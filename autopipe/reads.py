"""Values that Python reads from tensors while a model runs: `if mask.all():`, `lengths.tolist()`.

A traced graph has taken one branch for good, so every read is (1) answered truly while tracing,
(2) written down, and (3) checked again on every micro-batch by a node in the graph:

    record   one run with fake parameters and real inputs. A read of what depends on inputs, buffers
             and constants alone is a real value; one that depends on a parameter is not, and then
             the same run is made with the real model.
    replay   torch.export runs the model with fake inputs; reads are answered from the record, and
             each leaves `autopipe::read(tensor, i)` in the graph.
    check    at run time that node compares the tensor with the record.

A number that nothing depends on (`logged`) leaves no node: there is nothing to check.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopipe import places
from autopipe.errors import AutopipeError, CaptureError, ModelError
from autopipe.fake import (
    DataDependentOutputException,
    TorchDispatchMode,
    is_fake,
    lists_as_one_read,
    written_arguments,
)
from autopipe.logged import Looked, used
from autopipe.plan import Read


class ReadsParameter(Exception):
    """A read depends on a parameter that has no values; `place` is the user's line."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


class NeedsNumbers(Exception):
    """The model fails on what stands for the numbers it reads (`logged.Looked`)."""


def _truth(tensor: Tensor) -> bool:
    return bool(tensor)


_READERS: Mapping[str, Callable[[Tensor], Any]] = {
    "__bool__": _truth,
    "is_nonzero": _truth,
    "__contains__": _truth,
    "equal": _truth,
    "allclose": _truth,
    "__int__": int,
    "__index__": int,
    "__float__": float,
    "item": Tensor.item,
    "tolist": Tensor.tolist,
}


def _subject(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The tensor whose value a read gives: for `x in t` it is `(t == x).any()`."""
    first: Tensor = args[0]
    if name == "__contains__":
        found: Tensor = (first == args[1]).any()
        return found
    if name == "equal":
        # The dims first: sizes of unlike tensors must not be compared, the batch may be among them.
        alike = first.ndim == args[1].ndim and first.shape == args[1].shape
        return (first == args[1]).all() if alike else first.new_zeros(())
    if name == "allclose":
        return torch.isclose(*args, **kwargs).all()
    return first


def _value(name: str, tensor: Tensor) -> bool | int | float | str:
    """A read's value as the plan keeps it: lists are JSON text."""
    value = _READERS[name](tensor)
    return json.dumps(value) if isinstance(value, list) else value


@torch.library.custom_op("autopipe::read", mutates_args=())
def read_op(tensor: Tensor, index: int) -> None:
    """Stands in a traced graph for read number `index` of the record."""


@read_op.register_fake
def _(tensor: Tensor, index: int) -> None:
    return None


def check(tensor: Tensor, read: Read) -> None:
    """Refuse to go on where a recorded branch is not the one this micro-batch takes.

    Raises:
        ModelError: the value differs from the record.
    """
    check_op(tensor, read.kind, json.dumps(read.value), read.place)


@torch.library.custom_op("autopipe::check", mutates_args=())
def check_op(tensor: Tensor, kind: str, value: str, place: str) -> None:
    """`check` as an op, which a trace keeps; the value is JSON text."""
    _compare(tensor, Read(kind, json.loads(value), place))


@check_op.register_fake
def _(tensor: Tensor, kind: str, value: str, place: str) -> None:
    return None


def _compare(tensor: Tensor, read: Read) -> None:
    found = _value(read.kind, tensor)
    both_nan = found != found and read.value != read.value
    if found != read.value and not both_nan:
        raise ModelError(
            f"{read.place}: Python read {read.value!r} from a tensor here when the model was "
            f"traced, and reads {found!r} in this micro-batch: the traced branch is not the one "
            "it would take",
            hint="plan with inputs that take the branch your batches take, or make the branch "
            "part of the computation (torch.where)"
            + ("; a number for a log is read by .item()" if read.kind == "__float__" else ""),
        )


class _Recording(TorchFunctionMode):
    """Answers reads truly and keeps them."""

    def __init__(self, tainted: Callable[[Tensor], bool], numbers: bool) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self._tainted = tainted
        self._numbers = numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        args, kwargs = used(args), used(kwargs or {})
        known = bool(args) and isinstance(args[0], Tensor)
        if name == "__format__" and known and self._unknown(args[0]):
            return _as_text(*args)
        if name not in _READERS or not known:
            return func(*args, **kwargs)
        tensor = _subject(name, args, kwargs)
        unknown, place = self._unknown(tensor), places.here()
        if name == "item" and not self._numbers:
            value = _zero(tensor) if unknown else tensor.item()
            self.reads.append(Read(name, value, place, checked=False))
            return Looked(partial(self._use, len(self.reads) - 1, unknown), value)
        if unknown:
            raise ReadsParameter(place)
        self.reads.append(Read(name, _value(name, tensor), place))
        return _READERS[name](tensor)

    def _unknown(self, tensor: Tensor) -> bool:
        return is_fake(tensor) or self._tainted(tensor)

    def _use(self, index: int, unknown: bool) -> Any:
        """The number that was read, which something depends on."""
        read = self.reads[index]
        if unknown:
            raise ReadsParameter(read.place)
        self.reads[index] = replace(read, checked=True)
        return read.value


def _zero(tensor: Tensor) -> bool | int | float:
    """In the place of a number that is not known, for a text."""
    if tensor.dtype == torch.bool:
        return False
    return 0.0 if tensor.dtype.is_floating_point else 0


def _as_text(tensor: Tensor, form: str) -> str:
    """What `f"{tensor:.3f}"` is where nobody knows the number."""
    return format(_zero(tensor), form) if tensor.ndim == 0 else object.__format__(tensor, "")


class _Taint(TorchDispatchMode):
    """Follows real tensors that a fake one was written into: their values mean nothing any more.

    out = torch.zeros(3)        # real
    out[0] = hidden.sum()       # hidden is fake: the zero stays, and is a lie from here on
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, Tensor] = {}  # by address; the tensor keeps the address taken

    def __call__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages

    def _mark(self, tensor: Tensor) -> None:
        if not is_fake(tensor) and tensor.numel():
            self._storages[tensor.untyped_storage().data_ptr()] = tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = list(_tensors((args, kwargs or {})))
        if any(is_fake(t) or self(t) for t in operands):
            for tensor in _tensors((result, written_arguments(func, args, kwargs or {}))):
                self._mark(tensor)
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from _tensors(item)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)


def record(
    run: Callable[[], object], again: Callable[[], object], *, numbers: bool = False
) -> tuple[Read, ...]:
    """The reads of one run of the model, in order. The global random state is left as it was.

    Args:
        again: runs the model another time, after a run that has read numbers for nothing.
        numbers: whether to take all numbers that are read for used.

    Raises:
        NeedsNumbers: it fails without.
        ReadsParameter: a read depends on a parameter, and the parameters are fake.
        CaptureError: the model uses a custom autograd.Function, whose backward a traced graph
            would lose.
    """
    taint = _Taint()
    recording = _Recording(taint, numbers)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _refusing_custom_functions():
        try:
            with lists_as_one_read(), taint, recording:
                run()
            if any(not read.checked for read in recording.reads):
                # A number may be kept for the next call, and used there.
                with lists_as_one_read(), taint, _Recording(taint, numbers):
                    again()
        except (AutopipeError, ReadsParameter):
            raise
        except DataDependentOutputException as error:
            raise ReadsParameter(places.of_error(error)) from error
        except Exception as error:  # whatever the model's own code raises
            if not numbers and any(read.kind == "item" for read in recording.reads):
                raise NeedsNumbers from error
            raise
    return tuple(recording.reads)


@contextmanager
def replay(reads: Sequence[Read]) -> Iterator[None]:
    """Answer reads from a record and leave `autopipe::read` in the graph for each.

    Raises:
        CaptureError: the run reads otherwise than the record, or uses a custom autograd.Function.
    """
    replaying = _Replaying(reads)
    with _refusing_custom_functions(), lists_as_one_read(), replaying:
        yield
    replaying.check_all_read()


class _Replaying(TorchFunctionMode):
    """Answers reads from a record, each in its turn."""

    def __init__(self, reads: Sequence[Read]) -> None:
        super().__init__()
        self._reads = reads
        self._next = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__format__" and is_fake(args[0]):
            return _as_text(*args)
        if name not in _READERS or not args or not isinstance(args[0], Tensor):
            return func(*used(args), **used(kwargs or {}))
        index, self._next = self._next, self._next + 1
        if index >= len(self._reads) or self._reads[index].kind != name:
            expected = self._reads[index].kind if index < len(self._reads) else "no further read"
            raise CaptureError(
                f"{places.here()}: Python reads a tensor here ({name}), where the record of the "
                f"model's reads has {expected}",
                hint="the model reads other tensors each time it runs (state kept between calls?)",
            )
        read = self._reads[index]
        if read.checked:
            read_op(_subject(name, args, kwargs or {}), index)
        return json.loads(read.value) if isinstance(read.value, str) else read.value

    def check_all_read(self) -> None:
        """Refuse a run that ended before the record did."""
        if self._next < len(self._reads):
            missing = self._reads[self._next]
            raise CaptureError(
                f"{missing.place}: Python read a tensor here ({missing.kind}) when the model's "
                "reads were recorded, and does not while it is traced",
                hint="the model reads other tensors each time it runs (state kept between calls?)",
            )


@contextmanager
def _refusing_custom_functions() -> Iterator[None]:
    """torch.export inlines the forward of an autograd.Function and forgets its backward."""
    original = torch.autograd.Function.__dict__.get("apply")
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch._"):  # how torch runs ops of torch.library
            return apply(cls, *args, **kwargs)
        if cls.__module__ == "torch.utils.checkpoint":
            raise CaptureError(
                f"{places.here()}: torch.utils.checkpoint is called in its reentrant mode, whose "
                "backward cannot be traced; the other one becomes recomputed blocks of the plan",
                hint="checkpoint(..., use_reentrant=False); of a model of transformers "
                'gradient_checkpointing_enable({"use_reentrant": False})',
            )
        raise CaptureError(
            f"{places.here()}: the model calls {cls.__module__}.{cls.__qualname__}, a custom "
            "autograd.Function; torch.export traces its forward and loses its backward",
            hint="register it as an op with torch.library.custom_op and register_autograd",
        )

    torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if original is None:
            del torch.autograd.Function.apply
        else:
            torch.autograd.Function.apply = original  # type: ignore[method-assign]
