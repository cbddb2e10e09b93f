"""Patches of torch's public classes, and of `len`: context managers that undo them afterwards.

    replacing_custom_functions   autograd.Function.apply       its backward would be lost
    seeing_saved_tensors_hooks   saved_tensors_hooks           where a checkpoint begins and ends
    watching_attributes          nn.Module's attribute access  what a module's code reads
    seeing_sets                  nn.Module's __setattr__       what forward sets in a module
    averaging_by_tensors         forward of batch norms        with momentum=None
    counting_rows                Python's len                  of a tensor is a symbol in a trace
    one_process                  distributed.is_initialized    ranks trace what was planned
    inference_without_gradients  inference_mode                export takes no note of it
    seeing_grad_modes            torch.autocast                export loses no_grad inside of it
    seeing_questions             SymBool's truth               export takes dims for two and more
    not_compiling                compiler.is_compiling         a trace has eager's branches
    replacing                    a function of Python's        torch.cond, packed sequences

Patches that touch private names stand in `ir.torch_private`; those of transformers in
`frontend.transformers_adapter`. Each docstring gives the reason why a patch is needed.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode


@contextmanager
def patched(owner: Any, name: str, replacement: object) -> Iterator[None]:
    """Within, replace the attribute `owner.name`; afterwards restore it, also after an error."""
    attributes = vars(owner)
    had, before = name in attributes, attributes.get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def replacing_custom_functions(replacement: Callable[..., Any]) -> Iterator[None]:
    """Within, `replacement(class, apply, args, kwargs)` is called where a Function is applied.

    torch.export inlines the forward of a custom Function and loses its backward; no hook of torch
    tells that one is applied. `apply(*args, **kwargs)` is what would have been called.
    """
    apply = vars(torch.autograd.Function)["apply"]  # a method of C since torch 2.14

    def apply_instead(cls: type, *args: Any, **kwargs: Any) -> Any:
        return replacement(cls, apply.__get__(None, cls), args, kwargs)

    with patched(torch.autograd.Function, "apply", classmethod(apply_instead)):
        yield


@contextmanager
def seeing_saved_tensors_hooks(
    entered: Callable[[saved_tensors_hooks], None], left: Callable[[saved_tensors_hooks], None]
) -> Iterator[None]:
    """Within, `entered` is called before and `left` after each block of saved-tensors hooks.

    `torch.utils.checkpoint` hides what it saves behind such hooks. Its function cannot be replaced:
    users and libraries have imported copies of the name.
    """
    with _around(saved_tensors_hooks, entered, left):
        yield


@contextmanager
def _around(
    kind: Any, entered: Callable[[Any], None], left: Callable[[Any], None]
) -> Iterator[None]:
    """Within, these are called before an object of a class is entered, and after it is left."""
    enter, leave = kind.__enter__, kind.__exit__

    def on_enter(self: Any) -> Any:
        entered(self)
        return enter(self)

    def on_exit(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        left(self)
        return result

    with patched(kind, "__enter__", on_enter), patched(kind, "__exit__", on_exit):
        yield


@contextmanager
def watching_attributes(
    reading: Callable[[nn.Module, str], Any],
    changing: Callable[[nn.Module, str, Any], None],
    removing: Callable[[nn.Module, str], None],
) -> Iterator[None]:
    """Within, these three functions replace attribute access on every nn.Module.

    A proof that two modules compute the same must see each attribute that their code reads; torch's
    hooks show calls only.
    """
    with ExitStack() as until:
        for name, function in (
            ("__getattribute__", reading),
            ("__setattr__", changing),
            ("__delattr__", removing),
        ):
            until.enter_context(patched(nn.Module, name, function))
        yield


@contextmanager
def seeing_sets(noted: Callable[[nn.Module, str], None]) -> Iterator[None]:
    """Within, `noted` is called after an attribute of a module is set.

    A value that is set to what it has been shows in no comparison.
    """
    before = nn.Module.__setattr__

    def changing(self: nn.Module, name: str, value: Any) -> None:
        before(self, name, value)
        noted(self, name)

    with patched(nn.Module, "__setattr__", changing):
        yield


@contextmanager
def averaging_by_tensors() -> Iterator[None]:
    """Within, batch norms with momentum=None average their statistics without Python's numbers.

    After n batches they are the mean over all n. torch's own code reads n, another number in every
    micro-batch, where here it stays a tensor:

        running = running (1 - 1/n) + batch 1/n
    """

    def averaged(norm: nn.BatchNorm1d, forward: Callable[..., Any], x: Tensor) -> Any:
        mean, variance, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
        if norm.momentum is not None or not norm.training:
            return forward(norm, x)
        if mean is None or variance is None or count is None:
            return forward(norm, x)
        of_batch = torch.zeros_like(mean), torch.zeros_like(variance)
        found = nn.functional.batch_norm(x, *of_batch, norm.weight, norm.bias, True, 1.0, norm.eps)
        with torch.no_grad():
            count.add_(1)
            share = 1 / count.to(mean.dtype)
            for statistic, new in zip((mean, variance), of_batch, strict=True):
                statistic.copy_(statistic * (1 - share) + new * share)
        return found

    def patched_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, input: averaged(self, forward, input)

    with ExitStack() as until:
        for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            until.enter_context(patched(kind, "forward", patched_forward(kind.forward)))
        yield


@contextmanager
def counting_rows() -> Iterator[None]:
    """Within, `len(tensor)` is its first size, which may be a symbol, as `tensor.shape[0]` is.

    Python itself makes a number of whatever `__len__` returns. Losses of contrastive models count
    rows so: `torch.arange(len(logits))`.
    """
    plain_len = builtins.len

    def rows_of(of: Any) -> Any:
        return of.shape[0] if isinstance(of, Tensor) and of.ndim else plain_len(of)

    with patched(builtins, "len", rows_of):
        yield


@contextmanager
def inference_without_gradients() -> Iterator[None]:
    """Within, `torch.inference_mode` switches gradients off, or on again, and does no more.

    Export keeps no note of it: what was computed within would have gradients in a graph.
    """
    kind: Any = torch.inference_mode
    own_enter, own_leave = kind.__enter__, kind.__exit__

    def enter(self: Any) -> None:
        entered = vars(self).setdefault("instead", [])
        if is_torchs(sys._getframe(1)):  # fake tensors are made so: it is no model's wish
            entered.append(None)
            own_enter(self)
            return
        entered.append(torch.no_grad() if self.mode else torch.enable_grad())
        entered[-1].__enter__()

    def leave(self: Any, *error: Any) -> None:
        mode = self.instead.pop()
        own_leave(self, *error) if mode is None else mode.__exit__(*error)

    with patched(kind, "__enter__", enter), patched(kind, "__exit__", leave):
        yield


@contextmanager
def seeing_grad_modes(changed: Callable[[bool | None], None]) -> Iterator[None]:
    """Within, `changed` is told where gradients go on or off inside of `torch.autocast`, and None
    where that ends, for export has no note of it; a `torch.no_grad()` there would be lost."""
    inside: list[bool] = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if inside and getattr(func, "__name__", "") == "_set_grad_enabled":
                inside[0] = True
                changed(torch.is_grad_enabled())
            return result

    def left(autocast: torch.autocast) -> None:
        if inside.pop() and not inside:
            changed(None)

    with _around(torch.autocast, lambda autocast: inside.append(False), left), Seeing():
        yield


def is_torchs(frame: FrameType) -> bool:
    """Whether code is torch's own; not its distributions, which ask too from torch 2.15 on."""
    file = frame.f_globals.get("__name__", "")
    if file == "torch.utils._contextlib":  # a decorator's code counts as its function's
        file = getattr(frame.f_locals.get("func"), "__module__", "")
    return f"{file}.".startswith("torch.") and not str(file).startswith("torch.distributions")


@contextmanager
def seeing_questions(asked: Callable[[torch.SymBool, bool, FrameType], None]) -> Iterator[None]:
    """Within, `asked` is told what code outside of torch asks of sizes, and the answer: export
    takes each dim to be two and more, and has no note of a question whether it is one."""
    own: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__

    def answered(question: torch.SymBool) -> bool:
        answer = own(question)
        if not is_torchs(frame := sys._getframe(1)):
            asked(question, answer, frame)
        return answer

    with patched(torch.SymBool, "__bool__", answered):
        yield


@contextmanager
def not_compiling() -> Iterator[None]:
    """Within, code not torch's own is told that it is neither compiled nor exported, as in eager.

    What torch.compile wraps runs as it was: fullgraph=True raises where modes look at what it does.
    """

    def answered(question: Callable[[], bool]) -> bool:
        caller = sys._getframe(3)  # behind `_asking` and `_asked_instead`
        if caller.f_globals.get("__name__") == "torch._dynamo.external_utils":
            caller = caller.f_back or caller  # `torch._dynamo.is_compiling` asks for who calls it
        refuses = caller.f_code.co_name == "nonrecursive_disable_wrapper"  # raises in a trace
        return is_torchs(caller) and not refuses and bool(own_of(question)())

    with ExitStack() as until, torch.compiler.set_stance("force_eager"):
        for question in (torch.compiler.is_compiling, torch.compiler.is_exporting):
            until.enter_context(replacing(question, partial(answered, question)))
        yield


_instead = threading.local()
_exchanged: Counter[Callable[..., Any]] = Counter()
_exchanging = threading.Lock()


@contextmanager
def replacing(function: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Within, this thread's calls of a function of torch, written in Python, go to `replacement`.

    The function's code is exchanged: users have imported copies of its name. torch.cond compiles
    what it is given, which it cannot where modes look at what is computed; the sizes of packed
    sequences depend on values.
    """
    own: Any = function
    with _exchanging:
        if not _exchanged[function]:
            plain = FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__)
            plain.__kwdefaults__ = own.__kwdefaults__
            own.__kwdefaults__ = {"autopipe_own": plain, "autopipe_asked": _asked_instead}
            own.__code__, own.__defaults__ = _asking.__code__, None
        _exchanged[function] += 1
    known = vars(_instead).setdefault("by_function", {})
    before = known.get(own.__name__)
    known[own.__name__] = replacement
    try:
        yield
    finally:
        known[own.__name__] = before
        with _exchanging:
            _exchanged[function] -= 1
            if not _exchanged[function]:
                plain = own.__kwdefaults__["autopipe_own"]
                own.__code__, own.__defaults__ = plain.__code__, plain.__defaults__
                own.__kwdefaults__ = plain.__kwdefaults__


def own_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as torch has it, also where it is being replaced."""
    found: Callable[..., Any] = (function.__kwdefaults__ or {}).get("autopipe_own", function)
    return found


def _asked_instead(plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    replacement = vars(_instead).get("by_function", {}).get(plain.__name__)
    return (replacement or plain)(*args, **kwargs)


def _asking(*args: Any, autopipe_own: Any, autopipe_asked: Any, **kwargs: Any) -> Any:
    return autopipe_asked(autopipe_own, args, kwargs)


@contextmanager
def one_process() -> Iterator[list[bool]]:
    """Within, torch.distributed tells code of a model that it is not initialised.

    So it was where the model was planned. A rank would trace calls of `all_reduce` (or build a
    model that makes them), and a SyncBatchNorm would wait for ranks that have other stages.

    Yields:
        a list that is empty until somebody asks.
    """
    asked: list[bool] = []

    def is_initialized() -> bool:
        asked.append(True)
        return False

    with patched(torch.distributed, "is_initialized", is_initialized):
        yield asked
