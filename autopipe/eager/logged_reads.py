"""Tell numbers that Python reads only for a log (`x.norm().item()`) from numbers that it uses.

    self.last = x.mean().item()          kept: nothing depends on it
    print(f"{x.mean().item():.3f}")      made into text: nothing depends on it
    self.heads[str(task.item())](x)      made into text: a layer depends on it
    if x.mean().item() > 3: ...          used: a branch of the graph stands on it
    y = x * scale.item()                 used: it is in the graph

While a model's reads are recorded, a `PlaceholderNumber` stands for each such number: it reports
any use other than keeping it or formatting it as text. A number that is never used needs no check
at run time. Whether a text matters is decided by runs whose texts show different numbers (`SHOWN`):
it matters if they use different layers (`LayersUsed`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopipe.eager.frozen import plain_of
from autopipe.ir.tensors import tensors_in

Number = bool | int | float
Use = Callable[[], Number]


class PlaceholderNumber:
    """A placeholder for a number; an operation that needs the number itself calls `use`.

    It is no float, since C code takes a float's value without any call. Code that accepts only a
    float fails, and then the model is run a second time on the numbers themselves.

    Args:
        text: the value to show when it is formatted.
    """

    __slots__ = ("_text", "_use")

    def __init__(self, use: Use, text: Number) -> None:
        self._use = use
        self._text = text

    # `isinstance(x, float)` holds, as of the number.
    __class__ = property(lambda self: type(self._text))

    def __repr__(self) -> str:
        return repr(self._text)

    def __format__(self, form: str) -> str:
        return format(self._text, form)

    def __reduce__(self) -> Any:
        return type(self._text), (self._use(),)

    def __deepcopy__(self, memo: object) -> PlaceholderNumber:
        return self  # kept still: a model that is copied does nothing with it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._use(), name)


def itself(number: Number) -> Number:
    """The number that was read."""
    return number


def next_one(number: Number) -> Number:
    """The next number, or the other truth value."""
    return not number if isinstance(number, bool) else number + 1


def far_above(number: Number) -> Number:
    """A number that is larger, and has more digits, than those a model compares a text with."""
    return True if isinstance(number, bool) else 1_000 * abs(number) + 1_000


def far_below(number: Number) -> Number:
    """The negative of `far_above`."""
    return False if isinstance(number, bool) else -far_above(number)


SHOWN = itself, next_one, far_above, far_below
"""What runs show in the place of a number that is made into text, one of these in each run."""


def zero(tensor: Tensor) -> Number:
    """A zero in place of an unknown number, to be formatted as text."""
    if tensor.dtype == torch.bool:
        return False
    return 0.0 if tensor.dtype.is_floating_point else 0


def as_text(tensor: Tensor, form: str) -> str:
    """The result of `f"{tensor:.3f}"` for an unknown number."""
    return format(zero(tensor), form) if tensor.ndim == 0 else object.__format__(tensor, "")


class LayersUsed(TorchFunctionMode):
    """Notes the parameters and the numbers that calls of torch are given, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[list[int], str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = used(args), used(kwargs or {})  # arguments of torch count as used
        given = [id(t) for t in tensors_in((args, kwargs)) if isinstance(t, nn.Parameter)]
        self.calls.append((given, repr(plain_of((args, kwargs)))))
        return func(*args, **kwargs)


def _asking(operation: Callable[..., Any]) -> Callable[..., Any]:
    def ask(self: PlaceholderNumber, *others: Any) -> Any:
        return operation(self._use(), *map(used, others))

    return ask


def _reflected(operation: Callable[..., Any]) -> Callable[..., Any]:
    def ask(self: PlaceholderNumber, other: Any) -> Any:
        return operation(used(other), self._use())

    return ask


_UNARY = ("abs", "neg", "pos", "invert", "index")
_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"),
    *("lshift", "rshift", "matmul"),
)
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_CONVERSIONS: Mapping[str, Callable[..., Any]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "hash": hash,
}
_REST: Mapping[str, Callable[..., Any]] = {"round": round, "divmod": divmod, "trunc": int}

for _name in (*_UNARY, *_BINARY, *_COMPARED):
    setattr(PlaceholderNumber, f"__{_name}__", _asking(getattr(operator, f"__{_name}__")))
for _name in _BINARY:
    setattr(PlaceholderNumber, f"__r{_name}__", _reflected(getattr(operator, f"__{_name}__")))
for _name, _function in {**_CONVERSIONS, **_REST}.items():
    setattr(PlaceholderNumber, f"__{_name}__", _asking(_function))


_WITHOUT = (Tensor, str)
"""Types of arguments that neither are placeholders nor contain any."""


def used(tree: Any) -> Any:
    """Replace each placeholder in a tree of arguments by its number, which counts as used."""
    if tree is None or isinstance(tree, _WITHOUT):  # most of them
        return tree
    if type(tree) is PlaceholderNumber:
        return tree._use()
    if type(tree) in (list, tuple):
        return type(tree)(map(used, tree))
    if type(tree) is slice:
        return slice(used(tree.start), used(tree.stop), used(tree.step))
    if isinstance(tree, Mapping):
        return {key: used(value) for key, value in tree.items()}
    return tree
