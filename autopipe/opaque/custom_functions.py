"""Make a user's `torch.autograd.Function` one op of the graph, whose own backward runs.

    Reverse.apply(x, 0.5)     traced as     autopipe::function([x], "model.Reverse(_, 0.5)")

torch.export would inline its forward and lose its backward. The op calls `apply` itself, wherever
it runs: in a trace, in a dry run, on a rank. Each process knows from its own trace which class the
text names. A Function that cannot be one op (it writes its input, takes a method or a list of
tensors, or gives more than tensors) makes the call around it a region.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, FunctionMeta
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from autopipe.errors import AutopipeError, CaptureError, Uncaptured
from autopipe.frontend import user_lines
from autopipe.ir.torch_patches import patched, replacing_custom_functions
from autopipe.ir.torch_private import (
    no_function_modes,
    no_modes,
    storage_key,
    version,
)
from autopipe.opaque.held_numbers import held_by
from autopipe.opaque.same_functions import alike
from autopipe.opaque.tried_functions import Tried, tried
from autopipe.rewriting.gpu_autocast import autocast_inside

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


@dataclass
class _Applied:
    """A Function with its arguments but for the tensors, and the numbers and texts that it reads
    besides (`held_numbers`); `single`: it gives a tensor, no tuple."""

    kind: type
    apply: Callable[..., Any]
    arguments: tuple[Any, ...]
    held: Mapping[str, Any]
    single: bool = True


class _Given:
    """Stands for a tensor among the arguments."""

    def __repr__(self) -> str:
        return "_"


_PLACE = _Given()
_known: dict[str, _Applied] = {}
_running: list[type] = []
"""The Functions that apply themselves now, each within the one before it."""

_library = torch.library.Library("autopipe", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "function(Tensor[] tensors, str call, bool random=False) -> Tensor[]"
)


def _run(tensors: Sequence[Tensor], call: str, random: bool = False) -> list[Tensor]:
    """Apply the Function; no result is in the memory of an argument, as the op's schema says."""
    applied = _known[call]
    with autocast_inside():
        results = _results(applied, tensors)
    given = {storage_key(tensor) for tensor in tensors}
    return [r.clone() if storage_key(r) in given else r for r in results]


def _results(applied: _Applied, tensors: Sequence[Tensor]) -> list[Tensor]:
    given, before = iter(tensors), [version(tensor) for tensor in tensors]
    arguments = [next(given) if a is _PLACE else a for a in applied.arguments]
    _running.append(applied.kind)
    try:
        output = applied.apply(*arguments)
    finally:
        _running.pop()
    applied.single = isinstance(output, Tensor)
    results = [output] if isinstance(output, Tensor) else list(output)
    if not all(isinstance(result, Tensor) for result in results):
        raise _refusal(applied.kind, "gives something that is no tensor")
    if before != [version(tensor) for tensor in tensors]:
        raise _refusal(applied.kind, "writes its input in place")
    return results


_library.impl("function", _run, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


@contextmanager
def as_ops() -> Iterator[None]:
    """Within, a custom Function that is applied is an op of a trace.

    Raises:
        CaptureError: a Function cannot be one op; names its class and the user's line.
    """
    seen: dict[str, type] = {}

    def applied(kind: type, apply: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        if kind is CheckpointFunction:
            return _checkpointed(*args)
        if _is_torchs(kind):
            return apply(*args, **kwargs)
        _check(kind, args, kwargs)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        arguments = tuple(_PLACE if isinstance(arg, Tensor) else arg for arg in args)
        name = f"{kind.__module__}.{kind.__qualname__}"
        held = held_by(kind)
        texts = [f"{key}={value!r}" for key, value in held.items()]
        call = f"{name}({', '.join([*map(repr, arguments), *texts])})"
        known = _known[call].kind if call in _known else kind  # of another model in this process
        if seen.setdefault(call, kind) is not kind or not alike(kind, known):
            raise _refusal(kind, "is one of two of that name")
        _known[call] = _Applied(kind, apply, arguments, deepcopy(held))
        found = _tried(_known[call], tensors)
        random = (True,) if found is not None and found.draws else ()
        results = torch.ops.autopipe.function.default(tensors, call, *random)
        return results[0] if _known[call].single else tuple(results)

    with replacing_custom_functions(applied), _bound_before(applied):
        yield


@contextmanager
def _bound_before(applied: Callable[..., Any]) -> Iterator[None]:
    """Within, `applied` is called for `double = Double.apply` too, a name for torch's own `apply`.

    Whoever calls it, torch looks for the `forward` of the class and gives it a context of the
    class: that forward is the op here.
    """

    def found(kind: type, name: str) -> Any:
        own = type.__getattribute__(kind, name)
        if name != "forward" or _running or _is_torchs(kind) or not _replaced():
            return own
        return _op_as_forward(kind, own, applied)

    with patched(FunctionMeta, "__getattribute__", found):
        yield


def _op_as_forward(kind: Any, own: Callable[..., Any], applied: Callable[..., Any]) -> Any:
    """A `forward` for a Function that makes it an op, where torch's own `apply` calls it."""

    @wraps(own)
    def forward(*args: Any) -> Any:
        if kind.setup_context is not torch.autograd.Function.setup_context:
            raise _refusal(kind, "is applied by a name that was given to its apply beforehand")
        context, *given = args
        if not isinstance(context, BackwardCFunction):  # the user calls it
            return own(*args)
        with _gradients_on() if context.next_functions else nullcontext():
            results = applied(kind, _APPLY.__get__(None, kind), tuple(given), {})
        several = results if isinstance(results, tuple) else (results,)
        context.mark_non_differentiable(*(r for r in several if not r.requires_grad))
        return results

    return forward


@contextmanager
def _gradients_on() -> Iterator[None]:
    """Within, gradients are on, as where the Function is applied; modes do not see the switch."""
    with no_function_modes():
        on = torch.set_grad_enabled(True)
    try:
        yield
    finally:
        with no_function_modes():
            on.__exit__(None, None, None)


def _is_torchs(kind: type) -> bool:
    """Whether ops of a library run so, or a checkpoint holds its arguments so (torch 2.11)."""
    return kind.__module__.startswith(("torch._", "torch.utils.checkpoint", "autopipe."))


_APPLY = vars(torch.autograd.Function)["apply"]
"""torch's own `apply`, before any replacement."""


def as_written() -> AbstractContextManager[object]:
    """Within, custom Functions apply themselves even under `as_ops`: a part of the model
    that runs as it is has them, and hooks on gradients, as its user wrote them."""
    return patched(torch.autograd.Function, "apply", _APPLY) if _replaced() else nullcontext()


def _replaced() -> bool:
    """Whether a Function that is applied here is an op."""
    return vars(torch.autograd.Function)["apply"] is not _APPLY


def _tried(applied: _Applied, tensors: Sequence[Tensor]) -> Tried | None:
    """What a Function does with copies, where no trace sees it; None: it fails on them.

    Raises:
        CaptureError: its backward writes what it was given.
        Uncaptured: it reads a tensor that the model has made, and that it is not given.
    """
    with no_modes(), no_function_modes():
        try:
            found = tried(lambda copies: _results(applied, copies), tensors)
        except AutopipeError:
            raise
        except Exception:  # it reads values, which a trace answers, or fails there as well
            return None
    if found.reads_others:
        raise _refusal(applied.kind, "reads a tensor that was made in this forward and kept")
    if found.written:
        raise CaptureError(
            f"{user_lines.here()}: the backward of {applied.kind.__module__}."
            f"{applied.kind.__qualname__} writes a tensor that its forward is given: in a pipeline "
            "later micro-batches have read it by then",
            hint="write buffers in forward, or give the sum of gradients to the optimizer",
        )
    return found


def check_held(call: str, place: str) -> None:
    """Refuse a Function that reads what forward has set, after the trace, when all that forward has
    set is put back.

    Args:
        call: the text by which an op names it.
        place: the user's line.

    Raises:
        CaptureError: names what is set.
    """
    applied = _known.get(call)
    if applied is None:
        return
    now = held_by(applied.kind)
    for name, value in applied.held.items():
        if repr(now.get(name)) != repr(value):
            raise CaptureError(
                f"{place}: {applied.kind.__qualname__}, a custom autograd.Function, reads {name}, "
                f"which forward sets to {value!r} from {now.get(name)!r} before: what sets it does "
                "not run where the Function does",
                hint="give it to the Function as an argument: Function.apply(x, scale)",
            )


asked_reentrant = ContextVar("asked_reentrant", default=False)
"""Whether the checkpoint that begins was asked for with `use_reentrant=True`."""


def _checkpointed(function: Callable[..., Any], keep_numbers: bool, *args: Any) -> Any:
    """A reentrant checkpoint, as the other mode makes it: that one leaves its ops in a trace.

    Where none of its arguments has a gradient, its results have none either.
    """
    if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        with torch.no_grad():
            return function(*args)

    def begun(*given: Any) -> Any:
        asked_reentrant.set(False)  # not of those within
        return function(*given)

    before = asked_reentrant.set(True)
    try:
        return checkpoint(begun, *args, use_reentrant=False, preserve_rng_state=keep_numbers)
    finally:
        asked_reentrant.reset(before)


_OF_PROCESSES = (
    "torch.distributed.",
    "torch.nn.parallel.",
    "torch.nn.modules._functions.SyncBatchNorm",
)
"""Where the Functions of torch stand that wait for other processes, by the beginnings of names."""


def _check(kind: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if kind.__name__ == "BackwardHookFunction":
        raise CaptureError(
            f"{user_lines.here()}: a backward hook is set on every module, by torch.nn.modules."
            "module.register_module_full_backward_hook or its like; it may change gradients, and "
            "is in no graph",
            hint="set it on the modules it is meant for, which then run as they are",
        )
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name.startswith(_OF_PROCESSES):
        raise CaptureError(
            f"{user_lines.here()}: {name} is torch's own, and not for one process alone",
            hint="leave what is for several processes to autopipe",
        )
    if _closes_over_tensors(kind):
        raise _refusal(kind, "reads a tensor or a module of the code around its class")
    for arg in (*args, *kwargs.values()):
        if not isinstance(arg, Tensor) and not _is_plain(arg):
            raise _refusal(kind, f"is given a {type(arg).__name__}")
    if kwargs:
        raise _refusal(kind, "is given arguments by name")


def _is_plain(arg: Any) -> bool:
    """Whether an argument is the same for every micro-batch, and has no tensor inside."""
    if isinstance(arg, tuple | list):
        return all(map(_is_plain, arg))
    if type(arg) is dict:
        return all(map(_is_plain, chain(*arg.items())))
    return isinstance(arg, _PLAIN)


def _closes_over_tensors(kind: type) -> bool:
    """Whether its code has tensors or modules of the function in which the class stands."""
    for name in ("forward", "setup_context", "backward"):
        code = inspect.unwrap(getattr(kind, name))
        if inspect.isfunction(code):
            around = inspect.getclosurevars(code).nonlocals.values()
            if any(isinstance(value, Tensor | nn.Module) for value in around):
                return True
    return False


def _refusal(kind: type, what: str) -> Uncaptured:
    return Uncaptured(
        f"{user_lines.here()}: {kind.__module__}.{kind.__qualname__}, a custom autograd.Function, "
        f"{what}; in a graph it takes tensors, numbers, texts and lists or dicts of these two, and "
        "gives new tensors",
        hint="change its forward so, or register it as an op with torch.library.custom_op and "
        "register_autograd",
        whole=True,
        lines=True,
    )
