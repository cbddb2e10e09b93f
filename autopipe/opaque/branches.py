"""Make `torch.cond` one op of the graph, which runs the side that its predicate chooses.

    torch.cond(p, lambda h: self.a(h), lambda h: h * k, (h,))
                traced as   autopipe::cond(p, [h, a.weight, a.bias, k], "5f0c...")

A side is one of the two functions. Tensors that they read besides their operands (parameters,
tensors of the code around them) are inputs of the op too. Like torch's own cond, the op saves only
its inputs, and backward runs the chosen side again. An input that only the other side reads gets a
gradient of zeros, not `None`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopipe.errors import CaptureError
from autopipe.frontend import user_lines
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_patches import replacing
from autopipe.ir.torch_private import TorchDispatchMode, is_fake, no_modes, tree_map, version
from autopipe.opaque.calls.sites import state_of
from autopipe.opaque.calls.states import first_names
from autopipe.opaque.calls.trees import NotPlain, distinct_tensors, parts_of, whole_of
from autopipe.rewriting.gpu_autocast import autocast_as_now, autocast_inside

_library = torch.library.Library("autopipe", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("cond(Tensor chosen, Tensor[] tensors, str call) -> Tensor[]")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Sides:
    """The two functions of a call of torch.cond.

    Attributes:
        sides: the functions for true and for false.
        model: the model whose code calls them.
        operands: their arguments, as a tree whose slots are numbers of `read`.
        read: the op's inputs: names of the model's tensors, other tensors as in the trace.
        gives: their result, as a tree whose slots are numbers of the op's results.
    """

    sides: tuple[Callable[..., Any], Callable[..., Any]]
    model: nn.Module
    operands: Any
    read: tuple[Tensor | str, ...]
    gives: Any

    def run(self, chosen: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The results of the chosen side, with `tensors` in the place of `read`.

        If `chosen` has no value, of the first side: both have results of the same shapes.
        """
        side = self.sides[0 if is_fake(chosen) or bool(chosen) else 1]
        originals = (state_of(self.model, t) if isinstance(t, str) else t for t in self.read)
        with _Replacing({id(old): new for old, new in zip(originals, tensors, strict=True)}):
            results = distinct_tensors(side(*whole_of(self.operands, tensors)))
        given = set(map(id, tensors))
        return [tensor.clone() if id(tensor) in given else tensor for tensor in results]


_known: dict[str, _Sides] = {}


class _Replacing(TorchFunctionMode):
    """Within, calls of torch get `others[id(t)]` in the place of a tensor t."""

    def __init__(self, others: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._others = others

    def _replaced(self, arg: Any) -> Any:
        return self._others.get(id(arg), arg) if isinstance(arg, Tensor) else arg

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._replaced, (args, kwargs or {}))
        return func(*args, **kwargs)


class _ChosenSide(torch.autograd.Function):
    """Runs a side and saves its inputs; backward runs it again, under the autocast of forward."""

    @staticmethod
    def forward(ctx: Any, call: str, chosen: Tensor, *tensors: Tensor) -> Any:
        ctx.call, ctx.autocast = call, autocast_as_now(chosen.device.type)
        ctx.save_for_backward(chosen, *tensors)
        return tuple(_known[call].run(chosen, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        chosen, *saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        pairs = list(zip(saved, needed, strict=True))
        given = [tensor.detach().requires_grad_(needs) for tensor, needs in pairs]
        with torch.enable_grad(), ctx.autocast():
            results = _known[ctx.call].run(chosen, given)
        carrying = [number for number, tensor in enumerate(results) if tensor.requires_grad]
        found = torch.autograd.grad(
            [results[number] for number in carrying],
            [tensor for tensor in given if tensor.requires_grad],
            [gradients[number] for number in carrying],
            allow_unused=True,
            materialize_grads=True,
        )
        each = iter(found)
        return None, None, *(next(each) if needs else None for needs in needed)


def _run(chosen: Tensor, tensors: Sequence[Tensor], call: str) -> list[Tensor]:
    with autocast_inside():
        return list(_ChosenSide.apply(call, chosen, *tensors))  # type: ignore[no-untyped-call]


_library.impl("cond", _run, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def as_ops(model: nn.Module) -> AbstractContextManager[None]:
    """Within, a `torch.cond` on a tensor is an op of a trace; on a size it is Python's `if`.

    Raises:
        CaptureError: its functions do what one op cannot; names the user's line.
    """
    return replacing(torch.cond, partial(_op, model))


def _op(
    model: nn.Module,
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any] = (),
) -> Any:
    """A call of torch.cond; the names are its own."""
    if not isinstance(pred, Tensor):
        return plain(pred, true_fn, false_fn, operands)
    tensors = distinct_tensors(operands)
    read: dict[int, Tensor] = {id(tensor): tensor for tensor in tensors}
    texts, gives, looks = [], [], []
    for side in (true_fn, false_fn):
        with no_modes(), torch.no_grad(), _Drawing(), _Reading(read) as reading:
            with replacing(torch.cond, _nested):
                result = side(*operands)
        found = distinct_tensors(result)
        try:
            gives.append(parts_of(result, found))
        except NotPlain as error:
            raise _refusal(str(error)) from error
        texts.append((reading.lines, [*map(reading.described, found)]))
        looks.append([(tuple(t.shape), t.dtype) for t in found])
    if gives[0] != gives[1] or looks[0] != looks[1]:
        raise _refusal("its two functions give tensors of other shapes or dtypes")
    names = first_names(model)  # of the trace's own tensors, which the model has for a while
    inputs = tuple(names.get(key, tensor) for key, tensor in read.items())
    called = parts_of(tuple(operands), tensors)
    digest = hashlib.sha256(repr((called, texts, gives[0])).encode()).hexdigest()[:12]
    _known[digest] = _Sides((true_fn, false_fn), model, called, inputs, gives[0])
    result = torch.ops.autopipe.cond.default(pred, [*read.values()], digest)
    return whole_of(gives[0], result)


def plain(
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any] = (),
) -> Any:
    """`torch.cond` as Python's `if`: torch's own does not run where a mode observes it."""
    return true_fn(*operands) if pred else false_fn(*operands)


def _nested(*args: Any, **kwargs: Any) -> Any:
    raise _refusal("one of its functions calls torch.cond")


class _Reading(TorchFunctionMode):
    """Notes the calls of torch within, and tensors that come from outside.

    Args:
        read: the tensors from outside known so far, by their identities; gets those that are found.

    Attributes:
        lines: what was called with what, equal for every trace of a model.
    """

    def __init__(self, read: dict[int, Tensor]) -> None:
        super().__init__()
        self._read = read
        self._made: dict[int, Tensor] = {}
        self.lines: list[str] = []

    def described(self, arg: Any) -> Any:
        """An argument or a result as text: a tensor by its number, a size by its formula."""
        if isinstance(arg, Tensor):
            if id(arg) in self._made:
                return f"made {[*self._made].index(id(arg))}"
            self._read.setdefault(id(arg), arg)
            return f"read {[*self._read].index(id(arg))}"
        return repr(arg)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _VALUES:
            raise _refusal(f"one of its functions calls {name}")
        whose = getattr(getattr(func, "__self__", None), "__name__", "")
        self.lines.append(f"{whose}.{name} {tree_map(self.described, (args, kwargs))}")
        before = [(tensor, version(tensor)) for tensor in tensors_in((args, kwargs))]
        result = func(*args, **kwargs)
        if any(id(t) in self._read and version(t) != count for t, count in before):
            raise _refusal("one of its functions writes a tensor in place")
        known = self._read.keys() | self._made.keys()
        self._made |= {id(t): t for t in tensors_in(result) if id(t) not in known}
        return result


_VALUES = frozenset("__bool__ __int__ __float__ __index__ item tolist numpy is_nonzero".split())
"""Functions that give Python a value of a tensor."""


class _Drawing(TorchDispatchMode):
    """Refuses random numbers: backward would draw others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _refusal("one of its functions draws random numbers")
        return func(*args, **(kwargs or {}))


def _refusal(what: str) -> CaptureError:
    return CaptureError(
        f"{user_lines.here()}: torch.cond cannot be one op of a graph: {what}",
        hint="compute both sides and choose by torch.where",
    )
