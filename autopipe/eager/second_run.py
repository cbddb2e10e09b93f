"""Run a model again, to see whether it then makes other calls of torch.

    self.count += 1               a count, which the first call has changed
    if self.step < 10:            a buffer that each call changes
    time.time() % 2 < 1           something in no attribute: a clock, bytes, a file

A trace has what one run computes, for good: in it values of plain attributes are constants, and so
are random numbers from outside torch (`eager.draws`). A model whose kept values change no later
computation (`self.last = hidden`) makes the same calls in a second run, and is taken.
"""

from __future__ import annotations

import json
import marshal
import re
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopipe.eager.assigned_buffers import buffers_of
from autopipe.eager.frozen import NO_PARAMETERS, plain_of
from autopipe.errors import CaptureError, DrawnBranch, OtherBranch, OtherCalls, Uncaptured
from autopipe.frontend import user_lines
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_private import is_fake, is_transformed, no_function_modes, version
from autopipe.planfile.parts import Read

SMALL = 4096
"""Elements of a tensor up to which its values are compared as part of a call."""

BINARY = 2
"""Marshal's format in which equal values are equal bytes: later ones depend on references."""


Call = tuple[tuple[str, Any], ...]
"""A call of torch: (function, its numbers), then (shape, values) of each tensor it is given."""


def calls_of(run: Callable[[], object], parameters: Mapping[int, int]) -> tuple[Call, ...]:
    """The calls of torch that a run makes, with their numbers and the values of small tensors.

    Args:
        parameters: as `Noted`.
    """
    with Noted(parameters) as noted:
        run()
    return tuple(noted.calls)


def check_unseen(
    first: Sequence[Call], again: Callable[..., object], parameters: Mapping[int, int]
) -> Sequence[Call]:
    """The calls of a second run; of a model that makes others in it, though no kept value has
    changed, a refusal.

    The second run may leave out calls of the first: those have filled a cache (`functools.cache`).

    Args:
        first: the calls of torch of the first run.
        again: takes a function that returns a mode, and makes another run under that mode, with
            the buffers and the random numbers of the first run.
        parameters: as `Noted`.

    Raises:
        OtherCalls: names the line of the first call that differs.
    """
    second = Noted(parameters)
    again(lambda: second)
    position = _first_difference(first, second.calls)
    if position == len(second.calls):
        return second.calls
    # Kept values have changed once more; the line is the same.
    noted = Noted(parameters, until=position)
    again(lambda: noted)
    at = f"{noted.place}: " if noted.place else ""
    raise OtherCalls(
        f"{at}the model computes something else here in a second call on the same rows: it "
        "keeps something outside of attributes and variables (bytes, a file), or reads a clock; a "
        "graph is that of a first call",
        hint="count in a buffer, register_buffer, and write that in place; draw with torch",
    )


def leaves_out(first: Sequence[Call], second: Sequence[Call]) -> bool:
    """Whether a second run makes only calls of the first, and the calls that it leaves out (they
    have filled a cache) draw no random numbers."""
    return _first_difference(first, second) == len(second) and not _draws_left_out(first, second)


def draws_left_out(first: Sequence[Call], second: Sequence[Call]) -> tuple[str, ...]:
    """The functions by which a first run draws and a second one does not, though it makes no other
    calls; nothing if it makes others."""
    if _first_difference(first, second) < len(second):
        return ()
    return _draws_left_out(first, second)


def _draws_left_out(first: Sequence[Call], second: Sequence[Call]) -> tuple[str, ...]:
    counts = Counter(call[0] for call in first)
    counts.subtract(call[0] for call in second)
    left = (re.findall(r"\w+", function) for (function, _), count in counts.items() if count > 0)
    return tuple(name for names in left for name in names if any(word in name for word in RANDOM))


RANDOM = "rand", "normal", "uniform", "bernoulli", "multinomial", "exponential", "dropout"
"""Words in the names of functions that draw random numbers."""


def _first_difference(first: Sequence[Call], second: Sequence[Call]) -> int:
    """The position in `second` of its first call that `first` does not have, in this order."""
    left = iter(first)
    for position, call in enumerate(second):
        if not any(_same(known, call) for known in left):  # continues behind the last match
            return position
    return len(second)


def _same(first: Call, second: Call) -> bool:
    """Whether two calls are the same; values of tensors that the first run made do not count."""
    if first == second:
        return True
    pairs = list(zip(first[1:], second[1:], strict=False))
    alike = first[0] == second[0] and len(first) == len(second)
    return alike and all(a == b or (a[0] == b[0] and a[1] is None) for a, b in pairs)


class Changes:
    """Whether a run draws random numbers or changes buffers: the next run may then differ.

    Made before the run, asked after it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._now()

    def seen(self) -> bool:
        """Whether random numbers were drawn or buffers changed since this was made."""
        return self._now() != self._before

    def drawn(self) -> bool:
        """Whether random numbers were drawn since this was made."""
        return self._now()[0] != self._before[0]

    def _now(self) -> tuple[bytes, Hashable]:
        buffers = buffers_of(self._model).values()
        drawn = torch.get_rng_state().numpy().tobytes()
        return drawn, tuple((id(buffer), version(buffer)) for buffer in buffers)


def other_reads(first: Sequence[Read], again: Callable[[], Sequence[Read]]) -> CaptureError | None:
    """The error for a model whose Python reads other values in a second call on the same rows, or
    None.

    Args:
        first: the reads of the first call.
        again: gives the reads of a second call, with the random numbers of the first.
    """
    for read, later in zip(first, again(), strict=False):
        if read.checked and repr(read) != repr(later):  # where nan is nan
            return CaptureError(
                f"{read.place}: Python reads {answer(read.value)!r} from a tensor in a first call "
                f"of the model and {answer(later.value)!r} in a second one, on the same rows; a "
                "graph has one of the two for good",
                hint="compute with the tensor: torch.clamp(self.step / 10, max=1); what a first "
                "call is to initialise, call the model once for in model()",
            )
    return None


Unexpected = Callable[[Read | None, Read], Uncaptured]
"""Makes the error for (expected read, found read) that differ; None: no read was expected."""


def of_other_rows(first: Read | None, other: Read) -> Uncaptured:
    """The error where other rows give another read than the first rows; None: these give none."""
    return OtherBranch(
        f"{other.place}: Python reads {_value(first)} from a tensor here of the first two rows, "
        f"and {_value(other)} of the next two",
        hint="make the branch part of the computation (torch.where)",
        lines=True,
    )


def of_other_draws(first: Read | None, other: Read) -> Uncaptured:
    """The error where other random numbers give another read than the first ones."""
    return DrawnBranch(
        f"{other.place}: Python reads {_value(first)} from a tensor here with some random "
        f"numbers, and {_value(other)} with others, on the same rows; a graph has one of the two "
        "for good",
        hint="compute with the tensor: torch.where(torch.rand(()) < 0.5, self.layer(x), x)",
        lines=True,
    )


def _value(read: Read | None) -> str:
    return "nothing" if read is None else repr(answer(read.value))


def answer(value: bool | int | float | str) -> Any:
    """What Python reads where a record has this value: text is JSON, of a list or an infinity."""
    return json.loads(value) if isinstance(value, str) else value


@contextmanager
def other_draws(seed: int, share: float | None) -> Iterator[None]:
    """Within, torch draws from another seed.

    Args:
        seed: the seed. Several are tried: of a few layers that are left out with a chance of 0.1
            each, one seed may leave out none.
        share: where single numbers lie between the least (0) and the most (near 1) that may be
            drawn: a hundred seeds may all take one side of `if torch.rand(()) < 0.01:`. None: as
            the seed gives them.
    """
    with torch.random.fork_rng(devices=[]), nullcontext() if share is None else _Drawn(share):
        torch.manual_seed(seed)
        yield


Draws = tuple[int, float | None]

DRAWS: tuple[Draws, ...] = *((seed, None) for seed in range(1, 6)), (1, 0.0), (1, 1 - 2**-24)
"""What `other_draws` is called with: other seeds alone, the least, the most."""


MOST_ALIKE = 300
"""Draws of a run that may all be alike: a loop that draws until a number will do has to end."""


class Share:
    """The draws of a run: each lies at this share of the way from the least to the most.

    The first `MOST_ALIKE` draws lie at the share given (0: the least, near 1: the most), later ones
    are spread over all of the way.
    """

    def __init__(self, share: float) -> None:
        self._share, self._drawn = share, 0

    def next(self) -> float:
        """The share of the next draw."""
        self._drawn += 1
        return self._share if self._drawn <= MOST_ALIKE else self._drawn * 0.618 % 1


class _Drawn(TorchFunctionMode):
    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = Share(share)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _DRAWING or result.numel() != 1:
            return result
        share = self._share.next()
        if func is torch.bernoulli:
            return (share < args[0]).to(result.dtype).view_as(result)
        if func is Tensor.bernoulli_:
            chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return result.fill_(bool(share < chance))
        if func is Tensor.uniform_:
            low = args[1] if len(args) > 1 else 0
            high = args[2] if len(args) > 2 else kwargs.get("to", 1)
            return result.fill_(low + share * (high - low))
        ends = [arg for arg in (*args, *map(kwargs.get, ("low", "high"))) if isinstance(arg, int)]
        low, high = (ends if len(ends) > 1 else [0, *ends]) if func is torch.randint else (0, 1)
        return result.fill_(low + share * (high - low))  # integers round down


_DRAWING = (
    torch.rand,
    torch.rand_like,
    torch.randint,
    torch.bernoulli,
    Tensor.bernoulli_,
    Tensor.uniform_,
)


class Noted(TorchFunctionMode):
    """Notes the calls of torch, with their numbers and the values of small tensors from outside.

    Values of a tensor that an earlier call has made are not noted: they follow from that call, or
    are what memory held before (`torch.empty`). Attributes (`x.dtype`, `x.shape`) are no calls.

    Args:
        parameters: `frozen.numbered` of the model's; one that a call makes has no number.
        until: the number of a call.

    Attributes:
        calls: the calls so far.
        place: the user's line at call number `until`, once that was made.
    """

    def __init__(self, parameters: Mapping[int, int] = NO_PARAMETERS, until: int = -1) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.place = ""
        self._parameters, self._until = parameters, until
        self._made: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = plain_of((args, kwargs or {}))
        with no_function_modes():  # to look at a value is no read of the model's
            given = [
                (str(tensor.shape), self._values(tensor))
                for tensor in tensors_in((args, kwargs or {}))
            ]
        call = (str(func), repr(plain)), *given
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if isinstance(result, Tensor) or name not in ("__get__", "untyped_storage"):
            if len(self.calls) == self._until:
                self.place = user_lines.here()
            self.calls.append(call)
        for tensor in tensors_in((args, kwargs or {}) if name == "numpy" else ()):
            self._made.pop(id(tensor), None)  # numpy may write it
        for tensor in tensors_in(result):
            self._made[id(tensor)] = weakref.ref(tensor)
        return result

    def _values(self, tensor: Tensor) -> bytes | int | None:
        """The values of a small tensor from outside; the number of a parameter; None: no note."""
        if isinstance(tensor, nn.Parameter) or is_fake(tensor):
            return self._parameters.get(id(tensor))
        if is_transformed(tensor) or tensor.is_nested or tensor.numel() > SMALL:
            return None
        reference = self._made.get(id(tensor))
        if reference is not None and reference() is tensor:
            return None
        dense = tensor.detach().to_dense()
        return marshal.dumps(dense.tolist(), BINARY)  # a text takes 20 times as long
