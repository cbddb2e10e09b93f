"""Find reads of buffers that count calls, and after how many calls they give another value.

    self.calls += 1                     a buffer
    if self.calls >= 1000: ...          reads False in a first call, and True in the 1000th

The record of a model's reads is that of a first call, and a micro-batch that reads otherwise is
refused. So the call of the module or method that reads runs as it is or, if none can, whoever plans
is told, before the 1000th micro-batch of a run ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopipe.eager.assigned_buffers import buffers_of
from autopipe.eager.counts import AHEAD, MOST_PLACES
from autopipe.eager.second_run import answer
from autopipe.eager.taint import Taint
from autopipe.errors import LaterBranch
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_private import is_fake, no_function_modes
from autopipe.planfile.parts import Read

Again = Callable[..., tuple[Read, ...]]
"""Gives the reads of one more run; takes a mode as `noted`, and a `taint` to follow tensors."""

Numbers = Mapping[str, float]
"""The values of the buffers of one number."""


def later_read(model: nn.Module, first: Sequence[Read], again: Again, refuse: bool) -> str:
    """The words for a read that gives another value after more calls; "" if none is found.

    The model's buffers are left changed.

    Args:
        first: the reads of the first call, which those of the second one equal.
        refuse: whether to raise the words where the value is read.

    Raises:
        LaterBranch: with the words, in the model's own code.
    """
    for calls, reads, repeat in _later_calls(model, again):
        for read, later in zip(first, reads, strict=False):
            if read.checked and repr(read) != repr(later):  # where nan is nan
                now, then = answer(read.value), answer(later.value)
                words = (
                    f"{read.place}: Python reads {now!r} from a tensor here, and {then!r} after "
                    f"some {calls} calls of the model, which a buffer counts"
                )
                if refuse:
                    repeat(expected=first, unlike=partial(_refusal, words))
                return f"{words}: that micro-batch is refused in the run"
    return ""


def _refusal(words: str, known: Read | None, found: Read) -> LaterBranch:
    hint = "make the branch part of the computation (torch.where); a number without .item()"
    return LaterBranch(words, hint=hint, lines=True)


def _later_calls(model: nn.Module, again: Again) -> Iterator[tuple[int, tuple[Read, ...], Again]]:
    """How many calls are behind, the reads of the next one, and what makes that one again, with
    counters farther and farther ahead; nothing if no read depends on a counter."""
    numbers = [_numbers(model)]
    with suppress(Exception):  # a table of the user's may be shorter
        for _ in range(2):
            again()
            numbers.append(_numbers(model))
    counters = dict(_counters(*numbers)) if len(numbers) > 2 else {}
    if not counters:
        return
    marked = Taint([buffers_of(model)[name] for name in counters])
    compared = _Compared(marked)
    with suppress(Exception):  # ReadsParameter at a read of a counter, or what torch makes of it
        again(noted=lambda: compared, taint=marked)
        return
    reached = {n for count in counters.values() for n in _reached(*count, compared)}

    def at(calls: int, **expected: Any) -> tuple[Read, ...]:
        with torch.no_grad():
            for name, (number, rise) in counters.items():
                buffers_of(model)[name].fill_(number + rise * (calls - 2))
        return again(**expected)

    for calls in sorted({2, 3, *AHEAD, *islice(sorted(reached), MOST_PLACES)}):
        try:
            reads = at(calls)
        except Exception:  # whatever the user's code raises
            continue
        yield calls, reads, partial(at, calls)


def _counters(
    before: Numbers, between: Numbers, after: Numbers
) -> Iterator[tuple[str, tuple[float, float]]]:
    """The buffers that each of two calls raised alike: the number after them, and by how much."""
    for name in before.keys() & between.keys() & after.keys():
        rise = between[name] - before[name]
        if rise and after[name] - between[name] == rise:
            yield name, (before[name], rise)


def _numbers(model: nn.Module) -> Numbers:
    """The real buffers of one number."""
    return {
        name: buffer.item()
        for name, buffer in buffers_of(model).items()
        if buffer.numel() == 1 and buffer.layout == torch.strided and not is_fake(buffer)
        if buffer.dtype != torch.bool and not buffer.is_complex()
    }


def _reached(number: float, rise: float, compared: _Compared) -> Iterator[int]:
    """After how many calls a count is at a number that it is compared with, or next to it."""
    for other in compared.numbers:
        calls = 2 + int((other - number) / rise)
        yield from (near for near in (calls - 1, calls, calls + 1) if near > 0)


class _Compared(TorchFunctionMode):
    """Notes the numbers that calls of torch get beside marked tensors."""

    def __init__(self, marked: Taint) -> None:
        super().__init__()
        self.numbers: set[float] = set()
        self._marked = marked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        with no_function_modes():
            dense: list[Tensor] = [tensor for tensor in tensors_in(given) if not is_fake(tensor)]
            if any(map(self._marked, dense)):
                self.numbers |= {one for one in given if type(one) in (int, float) and one == one}
        return func(*args, **(kwargs or {}))
