"""Record, replay and check the values that Python reads from tensors: `if mask.all():`.

A traced graph contains one branch only, so every read is (1) answered with the real value while
tracing, (2) recorded, and (3) checked on every micro-batch by a node in the graph:

    record   one run with fake parameters and real inputs. A read that depends on inputs, buffers
             and constants alone gives a real value; one that depends on a parameter does not, and
             then the run is repeated with the real model.
    replay   torch.export runs the model with fake inputs; reads are answered from the record, and
             each leaves `autopipe::read(tensor, i)` in the graph.
    check    at run time that node compares the tensor with the record.

A number that nothing depends on (`eager.logged_reads`) leaves no node: nothing needs a check.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopipe.eager import logged_reads
from autopipe.eager.logged_reads import Number, used
from autopipe.eager.second_run import Unexpected, answer, of_other_rows
from autopipe.eager.taint import Taint
from autopipe.errors import AutopipeError, CaptureError, ModelError, Uncaptured
from autopipe.frontend import refusals, user_lines
from autopipe.ir.tensors import of_unknown_size, tensors_in
from autopipe.ir.torch_private import DataDependentOutputException, is_fake, lists_as_one_read
from autopipe.opaque.custom_functions import as_ops
from autopipe.planfile.parts import Read
from autopipe.tracing.capture.caught_errors import noted


class ReadsParameter(Exception):
    """Raised where a read depends on a fake parameter, which has no values; has the user's line."""


class NeedsNumbers(Exception):
    """Raised where the model fails on a `logged_reads.PlaceholderNumber`, or runs other layers when
    the placeholder shows another number."""


_READERS: Mapping[str, Callable[[Tensor], Any]] = {
    "__bool__": bool,
    "is_nonzero": bool,
    "__contains__": bool,
    "equal": bool,
    "allclose": bool,
    "__int__": int,
    "__index__": int,
    "__float__": float,
    "item": Tensor.item,
    "__format__": Tensor.item,
    "tolist": Tensor.tolist,
}


def _subject(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The tensor whose value a read returns; for `x in t` it is `(t == x).any()`."""
    first: Tensor = args[0]
    if name == "__contains__":
        return torch.any(first == args[1])
    if name == "equal":
        # The dims first: sizes of unlike tensors must not be compared, the batch may be among them.
        alike = first.ndim == args[1].ndim and first.shape == args[1].shape
        return (first == args[1]).all() if alike else first.new_zeros(())
    if name == "allclose":
        return torch.isclose(*args, **kwargs).all()
    return first


def _value(name: str, tensor: Tensor) -> bool | int | float | str:
    """A read's value as a plan has it."""
    return _written(_READERS[name](tensor))


def _written(value: Any) -> bool | int | float | str:
    """The inverse of `answer`, as a plan has a value: lists, infinities and nan are JSON text."""
    as_text = isinstance(value, list) or (isinstance(value, float) and not math.isfinite(value))
    written: bool | int | float | str = json.dumps(value) if as_text else value
    return written


@torch.library.custom_op("autopipe::read", mutates_args=())
def read_op(tensor: Tensor, index: int) -> None:
    """Marks in a traced graph the read number `index` of the record."""


@read_op.register_fake
def _(tensor: Tensor, index: int) -> None:
    return None


def check(tensor: Tensor, read: Read) -> None:
    """Compare a tensor of this micro-batch with the recorded read.

    Raises:
        ModelError: the value differs from the record, so the model would take another branch.
    """
    check_op(tensor, read.kind, json.dumps(read.value), read.place)


@torch.library.custom_op("autopipe::check", mutates_args=())
def check_op(tensor: Tensor, kind: str, value: str, place: str) -> None:
    """`check` as an op, which a trace keeps; `value` is JSON text."""
    _compare(tensor, Read(kind, json.loads(value), place))


@check_op.register_fake
def _(tensor: Tensor, kind: str, value: str, place: str) -> None:
    return None


def _compare(tensor: Tensor, read: Read) -> None:
    found = _value(read.kind, tensor)
    if found != _written(read.value):
        raise ModelError(
            f"{read.place}: Python read {answer(read.value)!r} from a tensor here when the model "
            f"was traced, and reads {answer(found)!r} in this micro-batch: the traced branch is "
            "not the one it would take",
            hint="plan with inputs that take the branch your batches take, or make the branch "
            "part of the computation (torch.where)"
            + ("; a number for a log is read by .item()" if read.kind == "__float__" else "")
            + ("; compute with the tensor, not with .item() of it" if read.kind == "item" else ""),
        )


class _Recording(TorchFunctionMode):
    """Answers reads with their real values and records them; refuses an unexpected read."""

    def __init__(
        self,
        tainted: Callable[[Tensor], bool],
        numbers: bool,
        expected: Sequence[Read] | None = None,
        shown: Callable[[Number], Number] = logged_reads.itself,
        unlike: Unexpected = of_other_rows,
    ) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self.refused: Uncaptured | None = None
        self._expected, self._shown, self._unlike = expected, shown, unlike
        self._tainted, self._numbers = tainted, numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        args, kwargs = used(args), used(kwargs or {})
        known = bool(args) and isinstance(args[0], Tensor)
        if name == "__format__" and known and self._unknown(args[0]):
            return logged_reads.as_text(*args)
        if name == "__format__" and known and args[0].ndim == 0:
            number, place = args[0].item(), user_lines.here(alone=True)
            if isinstance(number, complex):  # which no plan holds
                raise noted(refusals.takes_a_number(place))
            self.reads.append(Read(name, _written(number), place, checked=self._numbers))
            self._check_expected(len(self.reads) - 1)
            return format(self._shown(number), args[1])
        if name not in _READERS or name == "__format__" or not known:
            return func(*args, **kwargs)
        tensor = _subject(name, args, kwargs)
        unknown, place = self._unknown(tensor), user_lines.here(alone=True)
        if tensor.is_complex() and name in ("item", "tolist"):  # which no plan holds
            raise noted(refusals.takes_a_number(place))
        if name == "item" and not self._numbers:
            value = logged_reads.zero(tensor) if unknown else tensor.item()
            self.reads.append(Read(name, _written(value), place, checked=False))
            use = partial(self._use, len(self.reads) - 1, unknown)
            return logged_reads.PlaceholderNumber(use, self._shown(value))
        if unknown:
            raise ReadsParameter(place)
        self.reads.append(Read(name, _value(name, tensor), place))
        self._check_expected(len(self.reads) - 1)
        return _READERS[name](tensor)

    def _unknown(self, tensor: Tensor) -> bool:
        return is_fake(tensor) or self._tainted(tensor)

    def _use(self, index: int, unknown: bool) -> Any:
        """The number that was read; from here on it counts as used."""
        read = self.reads[index]
        if unknown:
            raise noted(ReadsParameter(read.place))
        self.reads[index] = replace(read, checked=True)
        self._check_expected(index)
        return answer(read.value)

    def _check_expected(self, index: int) -> None:
        """Refuse a read that differs from the expected one, at the place where it is used."""
        if self._expected is None:
            return
        read = self.reads[index]
        known = self._expected[index] if index < len(self._expected) else None
        if known is None or repr((known.kind, known.value)) != repr((read.kind, read.value)):
            self.refused = self._unlike(known, read)
            raise noted(self.refused)


def record(
    run: Callable[[], object],
    again: Callable[[], object],
    *,
    numbers: bool = False,
    expected: Sequence[Read] | None = None,
    unlike: Unexpected = of_other_rows,
    taint: Taint | None = None,
) -> tuple[Read, ...]:
    """Record the reads of one run of the model, in order; the global random state is restored.

    Args:
        again: runs the model a second time, if some numbers were read but never used.
        numbers: whether to treat all numbers that are read as used.
        expected: the reads of another run, which these have to equal.
        unlike: makes the error from the expected read and the one found.
        taint: that of an earlier run, whose writes into buffers are still there.

    Raises:
        Uncaptured: a read is not the expected one; raised in the model's own code, by `unlike`.
        NeedsNumbers: the model fails on placeholders for numbers; pass `numbers=True`.
        ReadsParameter: a read depends on a parameter, and the parameters are fake.
        CaptureError: a custom autograd.Function cannot be one op (`opaque.custom_functions`).
    """
    taint = taint or Taint()
    recording = _Recording(taint, numbers, expected, unlike=unlike)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), as_ops():
        try:
            with lists_as_one_read(), taint, recording:
                run()
            if any(not read.checked for read in recording.reads):
                _check_unused(again, taint, numbers=numbers)
        except (AutopipeError, ReadsParameter, NeedsNumbers):
            raise
        except DataDependentOutputException as error:
            raise ReadsParameter(user_lines.of_error(error)) from error
        except Exception as error:  # whatever the model's own code raises
            if recording.refused is not None:  # torch's kernels drop what __index__ raises
                raise recording.refused from error
            if not numbers and any(read.kind in ("item", "__format__") for read in recording.reads):
                raise NeedsNumbers from error
            raise
    return tuple(recording.reads)


def _check_unused(again: Callable[[], object], taint: Taint, *, numbers: bool) -> None:
    """Raise `NeedsNumbers` if numbers that a run reads and does not use decide what runs later.

    One may be kept for the next call, and used there; or its text may choose a layer.
    """
    layers = []
    for shown in logged_reads.SHOWN:
        seeing = _Recording(taint, numbers, shown=shown)
        with lists_as_one_read(), taint, seeing, logged_reads.LayersUsed() as in_run:
            again()
        layers.append(in_run.calls)
    if any(calls != layers[0] for calls in layers):
        raise NeedsNumbers


@contextmanager
def replay(reads: Sequence[Read]) -> Iterator[None]:
    """Answer reads from the record, and trace an `autopipe::read` op for each.

    Raises:
        CaptureError: the run's reads differ from the record; or as `record`.
    """
    replaying = _Replaying(reads)
    with as_ops(), lists_as_one_read(), replaying:
        yield
    replaying.check_all_read()


class _Replaying(TorchFunctionMode):
    """Answers reads from a record, in order."""

    def __init__(self, reads: Sequence[Read]) -> None:
        super().__init__()
        self._reads = reads
        self._next = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__format__" and is_fake(args[0]) and not self._is_next(name):
            return logged_reads.as_text(*args)
        if name not in _READERS or not args or not isinstance(args[0], Tensor):
            result = func(*used(args), **used(kwargs or {}))
            if any(map(of_unknown_size, tensors_in(result))):
                raise refusals.depends_on_values(user_lines.here())
            return result
        index, self._next = self._next, self._next + 1
        if index >= len(self._reads) or self._reads[index].kind != name:
            expected = self._reads[index].kind if index < len(self._reads) else "no further read"
            raise CaptureError(
                f"{user_lines.here()}: Python reads a tensor here ({name}), where the record of "
                f"the model's reads has {expected}",
                hint="the model reads other tensors each time it runs: it keeps a state between "
                "calls, or goes through rows one by one (for row in x; x[rows, lengths - 1] "
                "does it for all, with rows = torch.arange(len(x)))",
            )
        read = self._reads[index]
        if read.checked:
            read_op(_subject(name, args, kwargs or {}), index)
        if name == "__format__":
            return format(answer(read.value), args[1])
        return answer(read.value)

    def _is_next(self, kind: str) -> bool:
        """Whether the record goes on with a read of this kind at this line."""
        following = self._reads[self._next : self._next + 1]
        return any((r.kind, r.place) == (kind, user_lines.here(alone=True)) for r in following)

    def check_all_read(self) -> None:
        """Refuse a run with fewer reads than the record."""
        if self._next < len(self._reads):
            missing = self._reads[self._next]
            raise CaptureError(
                f"{missing.place}: Python read a tensor here ({missing.kind}) when the model's "
                "reads were recorded, and does not while it is traced",
                hint="the model reads other tensors each time it runs (state kept between calls?)",
            )
