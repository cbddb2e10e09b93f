"""The one file that touches torch's private names: tensors with a shape and no memory.

`torch.export` is public; what it is made of is not. autopipe needs two of its parts directly:

* `FakeTensorMode` (torch._subclasses), described in torch's own guide on fake tensors and used by
  every compiler on top of torch. `meta` tensors, its public sibling, will not do: ops that mix a
  meta parameter with a CPU input are refused, and their kernels save other tensors for backward.
* `SymInt.node.expr`, the only way from an exported size to the sympy expression behind it;
* `TorchDispatchMode` and an op's `_schema`, to see every op a model runs and what it writes.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, cast

import sympy
import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "TorchDispatchMode",
    "build_fake",
    "expression",
    "fake_like",
    "fake_mode",
    "is_control_flow",
    "is_fake",
    "lists_as_one_read",
    "outside_fake_mode",
    "quiet",
    "skeleton",
    "storage_key",
    "views",
    "writes",
    "written_arguments",
]


def fake_mode() -> FakeTensorMode:
    """A mode in which ops compute shapes, dtypes and strides only; real operands are let in."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values behind it."""
    return isinstance(tensor, FakeTensor)


def outside_fake_mode() -> AbstractContextManager[object]:
    """Real tensors for a while, inside a fake mode."""
    return cast(AbstractContextManager[object], unset_fake_temporarily())


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging a trace for an op that has no version for fake tensors.

    The error still arises; whoever catches it knows better whether it matters.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same shape, strides, dtype and device in `mode`."""
    return cast(torch.Tensor, mode.from_tensor(tensor))


@contextmanager
def lists_as_one_read() -> Iterator[None]:
    """Make `tolist` of a fake tensor what it is of a real one: one call, not an `item` for each."""
    original = FakeTensor.tolist
    FakeTensor.tolist = torch.Tensor.tolist  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.tolist = original  # type: ignore[method-assign]


def expression(size: torch.SymInt | torch.SymFloat | torch.SymBool) -> sympy.Expr:
    """The sympy expression of a symbolic size."""
    return size.node.expr


def is_control_flow(op: object) -> bool:
    """Whether an op takes whole subgraphs: `cond`, `while_loop`, `map`."""
    return isinstance(op, HigherOrderOperator)


@cache
def writes(op: Any) -> tuple[int, ...]:
    """Positions of the arguments that an op writes in place; none for what is no torch op."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return ()
    return tuple(
        position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def views(op: Any) -> bool:
    """Whether an op's results may share memory with its first argument."""
    schema = getattr(op, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def written_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of one call that it writes in place."""
    names = [argument.name for argument in op._schema.arguments]
    return [
        args[position] if position < len(args) else kwargs.get(names[position])
        for position in writes(op)
    ]


def skeleton(model: nn.Module) -> nn.Module:
    """A deep copy whose parameters are fake: real buffers and Python state, no weights.

    Tied parameters stay tied. The copy costs the bytes of the buffers only.
    """
    mode = fake_mode()
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        if is_fake(parameter):
            memo[id(parameter)] = parameter
        else:
            memo[id(parameter)] = _fake_parameter(mode, parameter)
    return copy.deepcopy(model, memo)


def build_fake(factory: Callable[[], nn.Module]) -> nn.Module:
    """Run a model's constructor with parameters that turn fake as they are registered.

    Buffers are real, since Python may read them. A weight's memory is reserved by the
    constructor, never touched, and given back at once, so a model of any size can be built.
    """
    with _registering_fakes():
        return factory()


@contextmanager
def _registering_fakes() -> Iterator[None]:
    mode = fake_mode()
    # By identity, and only while the real one lives: its id may be taken again after that.
    made: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not is_fake(param):
            known = made.get(id(param))
            if known is None or known[0]() is not param:
                known = made[id(param)] = (weakref.ref(param), _fake_parameter(mode, param))
            param = known[1]
        original(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _fake_parameter(mode: FakeTensorMode, parameter: nn.Parameter) -> nn.Parameter:
    fake = nn.Parameter(fake_like(mode, parameter.detach()), parameter.requires_grad)
    fake.__dict__.update(parameter.__dict__)
    return fake


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors have in common that share memory, real or fake."""
    return int(tensor.untyped_storage()._cdata)
