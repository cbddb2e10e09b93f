"""Run a model twice or more: does anything that it keeps make a later call compute otherwise?

kept values have changed    a second run, and runs with counts far ahead (`counts.runs_ahead`)
nothing has changed         a second run, for changes that cannot be seen
                            (`second_run.check_unseen`)

A kept table of constants is none of these: its calls are in the first run alone, and no number of
the rows or of a weight is in it (`CallsOnRows`).

    if self.cos is None:                                first run     later runs
        self.cos = torch.arange(len(x)).cos()           noted: no     not made
    return self.linear(x) * self.cos                    noted: yes    noted, with equal values
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopipe.eager.counts import Calls, runs_ahead
from autopipe.eager.frozen import numbered, plain_of
from autopipe.eager.holders import Holder, Part, holders_of, modules_among, weights_of
from autopipe.eager.kept import Caches, KeptNow, restoring
from autopipe.eager.second_run import Call, Noted, check_unseen, draws_left_out
from autopipe.eager.taint import Taint
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_private import is_fake, is_transformed, no_function_modes, version

T = TypeVar("T")

FIRST, SECOND = 1, 2
"""The runs between which a model shows what each call leaves."""


def compared_runs(
    parts: Sequence[Part],
    rows: Iterable[Tensor],
    first: Callable[[Noted], T],
    again: Callable[[Callable[[], Noted]], object],
    others: Callable[[], object],
    caches_filled: Callable[[], Iterable[str]],
) -> tuple[T, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The result of a first run; the names of kept values that make a later run differ; the
    functions by which the first run alone draws random numbers; and the names of values that each
    run leaves.

    Args:
        parts: the model and its loss; what these runs change in them is put back.
        rows: the tensors of a batch, of which each run makes copies.
        first: makes the first run, notes its calls of torch, and puts buffers back.
        again: makes another run in the same way.
        others: makes a run without noting anything or putting anything back.
        caches_filled: names the buffers that are caches (`assigned_buffers.Assigned`), after a run.

    Raises:
        CaptureError: a second run makes other calls, though no kept value has changed.
    """
    with restoring(*parts) as changed:
        parameters = numbered(weights_of(parts))
        noted, caches = Noted(parameters), Caches(*parts)
        found = first(noted)
        names = (*changed(), *sorted(caches_filled()))
        if not names:
            again_calls = check_unseen(noted.calls, again, parameters)
            drawn = draws_left_out(noted.calls, again_calls) if caches.filled() else ()
            return found, (), drawn, ()
    (usual, second, later), left = _calls_on_rows(parts, rows, others)
    differ = any(other != usual for other in (second, *later))
    return found, names if differ else (), draws_left_out(usual, second), left


def _calls_on_rows(
    parts: Sequence[Part], rows: Iterable[Tensor], run: Callable[[], object]
) -> tuple[tuple[Calls, Calls, list[Calls | str]], tuple[str, ...]]:
    """The calls on rows of a first run, of a second one, and of those that `runs_ahead` makes; and
    the names of the values that the second one has changed or written."""
    weights = weights_of(parts)
    taint = Taint([*rows, *weights, *_written_buffers(parts, run)], draws=True)

    numbers, after_first, left = count(1), list[KeptNow](), dict[str, None]()

    def logged(run: Callable[[], object]) -> Calls:
        number = next(numbers)
        kept = [*_kept_tensors(holders_of(*parts))] if number == SECOND else []
        with taint, CallsOnRows(taint, numbered(weights)) as on_rows:
            run()
        if not any(map(is_fake, weights)):  # the taint holds all activations of the run
            taint.forget_all_but(_kept(parts))
        if number == FIRST:
            after_first.append(KeptNow(holders_of(*parts)))
        if number == SECOND:
            left.update(dict.fromkeys(after_first[0].changed()))
            left.update((name, None) for name, one, writes in kept if version(one) != writes)
        return tuple(on_rows.calls)

    with restoring(*parts):
        calls = runs_ahead(parts, run, logged)
    return calls, tuple(left)


_OF_SHAPES = {
    *("__get__", "__len__", "size", "dim", "ndimension", "numel", "nelement", "element_size"),
    *("stride", "storage_offset", "is_contiguous", "is_floating_point", "is_complex"),
}
"""Functions that tell a tensor's shape, dtype or place in memory, which equal rows share."""


class CallsOnRows(TorchFunctionMode):
    """Notes the calls of torch that depend on the rows, on a weight or on a random number, with all
    else that they are given: numbers, which parameters, and the values of other tensors.

    Args:
        taint: entered around this mode; its sources are the rows and the weights.
        parameters: as `second_run.Noted`.

    Attributes:
        calls: the calls so far, without values of what depends on a source.
    """

    def __init__(self, taint: Taint, parameters: Mapping[int, int]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._taint, self._parameters = taint, parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_function_modes():  # to look at a value is no read of the model's
            given = [*tensors_in((args, kwargs or {}))]
            on_rows = any(map(self._on_rows, given))
            call = self._call(func, args, kwargs, given) if on_rows else None  # before it writes
        result = func(*args, **(kwargs or {}))
        with no_function_modes():
            made = [*tensors_in(result)]
            if any(map(self._on_rows, made)):
                self.calls.append(call or self._call(func, args, kwargs, given))
            elif call and not made and getattr(func, "__name__", "") not in _OF_SHAPES:
                self.calls.append(call)  # it reads a value, has written one, or hangs a hook on it
        return result

    def _call(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Call:
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        return (
            (str(func), repr((plain_of((args, kwargs or {})), modes))),
            *((str(tensor.shape), self._values(tensor)) for tensor in given),
        )

    def _on_rows(self, tensor: Tensor) -> bool:
        unseen = is_fake(tensor) or is_transformed(tensor) or tensor.is_nested
        return unseen or tensor.layout != torch.strided or self._taint(tensor)

    def _values(self, tensor: Tensor) -> bytes | int | None:
        if self._on_rows(tensor):
            return self._parameters.get(id(tensor))
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return blake2b(plain.view(torch.uint8).numpy().tobytes()).digest()


def _kept_tensors(holders: Iterable[Holder]) -> Iterator[tuple[str, Tensor, int]]:
    """The tensors of holders, each with its name and the number of writes."""
    for holder in holders:
        for key, value in holder.values().items():
            if isinstance(value, Tensor) and not value.is_inference():
                yield holder.label(key), value, version(value)


def _kept(parts: Sequence[Part]) -> Iterator[Tensor]:
    """The tensors that models and losses keep."""
    for holder in holders_of(*parts):
        yield from tensors_in(holder.values())
    yield from _buffers(parts)


def _buffers(parts: Sequence[Part]) -> Iterator[Tensor]:
    for model in modules_among(parts):
        yield from model.buffers()


def _written_buffers(parts: Sequence[Part], run: Callable[[], object]) -> list[Tensor]:
    """The buffers that a run writes: the next micro-batch has other values in them."""
    buffers = [*_buffers(parts)]
    if not buffers:
        return []
    with restoring(*parts):
        before = [version(buffer) for buffer in buffers]
        run()
        return [b for b, count in zip(buffers, before, strict=True) if version(b) != count]
