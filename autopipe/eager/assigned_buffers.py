"""Turn the assignment of a buffer into a write in place: a graph can express only the write.

    eager                                       the graph
                                                own, self.ema = self.ema, self.ema.clone()
    self.ema = 0.9 * self.ema + 0.1 * mean      self.ema = 0.9 * self.ema + 0.1 * mean
                                                own.copy_(self.ema)

The first line of the graph stands at the beginning of the call that assigns the buffer, the last
line at its end. That call is one of the buffer's own module, or of a module around it that calls
one of its methods (`self.rms.update(x)`). Autograd saves the copy, since the buffer changes later.

A buffer that is in no checkpoint and gets another shape or dtype is a cache: the model computes it
in its first call and keeps it, the graph computes it in every micro-batch. It stays as the run has
made it, for the values that the model keeps beside it (`self.length_of_cache`) stay too.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from autopipe.eager.holders import Holder, Part, holders_of, modules_among
from autopipe.eager.registered import KeptTensors, give
from autopipe.errors import CaptureError
from autopipe.frontend.user_lines import begins
from autopipe.ir.tensors import overlap
from autopipe.ir.torch_private import is_fake, no_function_modes, storage_key, version


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Every buffer under every name."""
    return dict(model.named_buffers(remove_duplicate=False))


def put(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Make these tensors the model's buffers, in place of those that it has assigned."""
    for name, buffer in buffers.items():
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, buffer)


@contextmanager
def as_before(
    *parts: Part, holders: Sequence[Holder] | None = None, caches: bool = False
) -> Iterator[None]:
    """Within, buffers may be written and assigned, and other kept tensors written in place;
    afterwards all of them but caches are as they were.

    Args:
        holders: `holders_of(*parts)`, where the caller has them.
        caches: whether caches are as they were, too (`Assigned.caches`).

    Raises:
        CaptureError: a kept tensor that is too large to be copied was written.
    """
    buffers = [(model, buffers_of(model)) for model in modules_among(parts)]
    values = [
        (tensor, tensor.detach().clone()) for _, known in buffers for tensor in known.values()
    ]
    kept = KeptTensors(holders_of(*parts) if holders is None else holders)
    try:
        yield
    finally:
        with torch.no_grad():
            for model, known in buffers:
                filled = set() if caches else _filled(model, known)
                put(model, {name: b for name, b in known.items() if name not in filled})
            for tensor, copied in values:
                give(tensor, copied)
            kept.put_back()
    kept.check()


@contextmanager
def frozen_as_before(model: nn.Module) -> Iterator[None]:
    """Within, forward may move frozen parameters, as a teacher's; afterwards they are as they were.

    A parameter whose memory was replaced (`k.data = q.data`) has its own memory again.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad and not is_fake(p)]
    before = [(parameter, parameter.data, parameter.detach().clone()) for parameter in frozen]
    try:
        yield
    finally:
        for parameter, memory, values in before:
            if parameter.data_ptr() != memory.data_ptr() or not torch.equal(parameter, values):
                parameter.data = memory.copy_(values)


def _filled(model: nn.Module, before: Mapping[str, Tensor]) -> set[str]:
    """The buffers that are caches: since `before` they got another shape or dtype, and they are in
    no checkpoint."""
    now = buffers_of(model)
    other = {n for n, old in before.items() if n in now and not _alike(now[n], old)}
    if not other:
        return other
    with no_function_modes():  # of a large model a state dict takes a second: it detaches them all
        return other - model.state_dict().keys()


@dataclass(frozen=True)
class Assigned:
    """The buffers that a run has assigned. `states` maps each buffer's name to the path of the
    module whose call assigned it; `caches` names those that are in no checkpoint."""

    states: dict[str, str] = field(default_factory=dict)
    caches: set[str] = field(default_factory=set)


@contextmanager
def written(model: nn.Module, names: Mapping[str, str]) -> Iterator[Assigned]:
    """Within, each buffer of `names` is written at the end of the call that assigns it
    (`Assigned.states`).

    Yields:
        an `Assigned`, which at the end has the other buffers that were assigned. Each buffer but a
        cache is then the tensor that it was before.

    Raises:
        CaptureError: a buffer that is no cache gets another shape or dtype, or is assigned in
            another call than it was before; or it is resized, or written, and others are views of
            it.
    """
    before, found = buffers_of(model), Assigned()
    versions = {name: version(buffer) for name, buffer in before.items()}
    shapes = {name: buffer.shape for name, buffer in before.items()}
    try:
        with ExitStack() as until:
            calls = _Calls(model, names)
            until.callback(register_module_buffer_registration_hook(calls.seen).remove)
            for name, path in names.items():
                owner, _, leaf = name.rpartition(".")
                module = model.get_submodule(path)
                call = _AssigningCalls(model.get_submodule(owner), leaf, name)
                until.callback(module.register_forward_pre_hook(call.begin).remove)
                until.callback(module.register_forward_hook(call.end).remove)
            yield found
        _check_shapes(model, before, shapes)
        after = buffers_of(model)
        changed = [name for name, buffer in before.items() if after.get(name) is not buffer]
        _check_views(model, before, versions)
        found.caches.update(_filled(model, before))
        for name in changed:
            if name not in found.caches:
                found.states[name] = calls.around.get(name, name.rpartition(".")[0])
        _check_names(model, before, after, found.states)
        for name in sorted(found.states.keys() & names.keys()):
            raise CaptureError(
                f"{_owner(model, names[name])}: the buffer {name!r} is assigned here in one call, "
                "and elsewhere in another",
                hint="write it in place, buffer.copy_(value)",
            )
    finally:  # also after an error: the model may be traced again
        now = buffers_of(model)
        changed = [name for name, buffer in before.items() if now.get(name) is not buffer]
        put(model, {name: before[name] for name in changed if name not in found.caches})


def _check_shapes(
    model: nn.Module, buffers: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> None:
    """Refuse a buffer that is resized in place, which an op of a graph does not do."""
    for name, buffer in buffers.items():
        if buffer.shape != shapes[name]:
            raise CaptureError(
                f"{_of(model, name)}: the buffer {name!r} is resized from "
                f"{list(shapes[name])} to {list(buffer.shape)}, and a graph has one shape for good",
                hint="what a first call is to initialise, call the model once for in model()",
            )


def _check_names(
    model: nn.Module,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    assigned: Collection[str],
) -> None:
    """Refuse a buffer with several names if an assignment reaches only some of them."""
    for name in sorted(assigned):
        for other, buffer in before.items():
            if buffer is before[name] and after.get(other) is not after.get(name):
                raise CaptureError(
                    f"{_of(model, name)}: the buffer {name!r} is assigned, and {other!r}, which "
                    "was the same tensor before, is another one then",
                    hint=f"write it in place, buffer.copy_(value); or register {other!r} with a "
                    "tensor of its own: .clone()",
                )


def _check_views(
    model: nn.Module, buffers: Mapping[str, Tensor], versions: Mapping[str, int]
) -> None:
    """Refuse a write to a buffer of which another buffer is a view: ranks have two tensors."""
    for name, other in _sharing(buffers):
        buffer, view = buffers[name], buffers[other]
        written = version(buffer) != versions[name] and not is_fake(buffer)
        if written and overlap(buffer, view):
            raise CaptureError(
                f"{_of(model, name)}: forward writes the buffer {name!r}, and {other!r} is "
                "in the same memory; ranks have them as two tensors",
                hint=f"read {other!r} from {name!r} in forward, as a view of it; or register "
                "it with a tensor of its own: .clone()",
            )


def _sharing(buffers: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """The names of pairs of different tensors that share memory, each pair in both orders."""
    places: dict[int, list[str]] = {}
    with no_function_modes():  # a large model has thousands
        for name, buffer in buffers.items():
            places.setdefault(storage_key(buffer), []).append(name)
    return [
        (name, other)
        for names in places.values()
        for name, other in permutations(names, 2)
        if buffers[name] is not buffers[other]
    ]


def _of(model: nn.Module, name: str) -> str:
    """The user's line at which the forward of a buffer's module begins."""
    return _owner(model, name.rpartition(".")[0])


def _owner(model: nn.Module, path: str) -> str:
    return begins(type(model.get_submodule(path)).forward)


class _Calls:
    """Finds the calls in which buffers are assigned, except the buffers of `known`."""

    def __init__(self, model: nn.Module, known: Collection[str]) -> None:
        self.around: dict[str, str] = {}
        self._paths = {module: path for path, module in model.named_modules()}
        self._known = known

    def seen(self, module: nn.Module, leaf: str, buffer: Any) -> None:
        """Note an assignment; the innermost running call is of its module or of one around it."""
        path = self._paths.get(module)
        name = leaf if not path else f"{path}.{leaf}"
        if path is None or name in self._known:
            return
        calls = (called for called in map(self._paths.get, _called()) if called is not None)
        inner = next((called for called in calls if _is_in(path, called)), "")
        before = self.around.get(name, inner)
        while not _is_in(before, inner):  # assigned twice, in two of them: in that around both
            inner = inner.rpartition(".")[0]
        self.around[name] = inner


def _called() -> Iterator[nn.Module]:
    """The modules that are being called, from the innermost one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if (code.co_filename, code.co_name) == (_CALL.co_filename, _CALL.co_name):
            yield frame.f_locals["self"]
        frame = frame.f_back


_CALL = nn.Module.__call__.__code__


def _is_in(path: str, around: str) -> bool:
    return not around or path == around or path.startswith(f"{around}.")


def _alike(new: Tensor, old: Tensor) -> bool:
    return (new.shape, new.dtype) == (old.shape, old.dtype)


class _AssigningCalls:
    """The hooks around calls in which the buffer `leaf` of `owner` is assigned."""

    def __init__(self, owner: nn.Module, leaf: str, name: str) -> None:
        self._owner = owner
        self._leaf = leaf
        self._name = name
        self._originals: list[Tensor] = []

    def begin(self, module: nn.Module, args: Any) -> None:
        original = getattr(self._owner, self._leaf)
        if original is None:
            raise CaptureError(
                f"{begins(type(module).forward)}: the buffer {self._name!r} is None until the "
                "first call assigns it, and later calls assign it too, otherwise; a graph is that "
                "of one call",
                hint="register it with a tensor, or call the model once in model()",
            )
        self._originals.append(original)
        setattr(self._owner, self._leaf, original.clone())

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        original, new = self._originals.pop(), getattr(self._owner, self._leaf)
        if not _alike(new, original):
            raise CaptureError(
                f"{begins(type(module).forward)}: the buffer {self._name!r} is assigned a tensor "
                f"{new.dtype} of shape {tuple(new.shape)}, and was {original.dtype} of shape "
                f"{tuple(original.shape)}",
                hint="keep its shape and dtype, and write what changes in place",
            )
        with torch.no_grad():
            original.copy_(new)
        setattr(self._owner, self._leaf, original)
