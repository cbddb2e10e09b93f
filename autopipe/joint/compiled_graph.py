"""Compile a graph of ops for the tensors it is called with, by torch's compilers directly.

`torch.compile` reads Python before it compiles, and at each call checks all that it has read. For
an island of a stage these checks took longer than the island itself, and a graph of ops has no
Python to check. Only state and looks can change between its calls; they are checked here:

    call ──> state and looks as in the last one?  ──> function            a microsecond or two
                      │ no
                      └─> as in an earlier one? ──> function      of any place with equal code
                                │ no
                                └─> compile for them ──> function

*State* is torch's own: gradients, autocast, deterministic kernels, precision of products, threads.
*Looks* of a tensor are its shape, strides, dtype, device and class, whether it needs a gradient and
what modes see its ops; of arguments some of which are written, also which share a storage.

Private names of torch that have no public one, from 2.11 to 2.15:

* `lookup_backend`, what a name of a backend stands for, as `torch.compile` looks it up;
* `FakeTensorMode` with a `ShapeEnv`: without one compilers do not look for what they have on disk;
* `GlobalStateGuard` and `TensorGuards`, TorchDynamo's own checks of state and looks, in C++: in
  Python that of looks takes four times as long, on a few hundred islands a step;
* `is_in_torch_dispatch_mode`: whether somebody wants to see each op, as a counter of FLOPs.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from autopipe.ir.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    fake_like,
    storage_key,
)

Backend = str | Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]
"""As `torch.compile` takes it: a name, or what makes a function of a graph and arguments."""

# Compilers have globals; threads (tests run one per stage) take turns.
_compiling = threading.Lock()


class CompiledGraph:
    """A graph of ops, compiled for each kind of arguments that any of its places has.

    Args:
        body: takes tensors and returns a tuple of tensors.
        writes: whether it may write arguments in place.
    """

    def __init__(self, body: fx.GraphModule, backend: Backend, *, writes: bool) -> None:
        self._body, self._backend, self._writes = body, backend, writes
        self._compiled: list[_Compiled] = []

    def at(self, name: str) -> CallSite:
        """A new place that calls this graph; stage code refers to it by this name."""
        return CallSite(name, self)

    def compiled(self, arguments: Sequence[Tensor]) -> _Compiled:
        """The function for these arguments' looks and the present state."""
        found = next((made for made in self._compiled if made.fits(arguments)), None)
        if found is None:
            found = _Compiled(self._function(arguments), arguments, self._writes)
            self._compiled.append(found)
        return found

    def _function(self, arguments: Sequence[Tensor]) -> Callable[..., Any]:
        if is_in_torch_dispatch_mode():
            return self._body  # a mode sees no op of a kernel
        shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        mode = FakeTensorMode(shape_env=shapes, static_shapes=True, allow_non_fake_inputs=True)
        try:
            with _compiling:
                compiler = torch._dynamo.lookup_backend(self._backend)
                like = {a: _like(mode, a) for a in arguments}
                compiled: Callable[..., Any] = compiler(self._body, [like[a] for a in arguments])
                return compiled
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._body  # an op asks for values, and tensors that are compiled for have none


def _like(mode: FakeTensorMode, argument: Tensor) -> Tensor:
    """A fake tensor of an argument, made without its `.grad` or that of its base: a fake mode
    refuses a gradient whose dtype is not its parameter's."""
    return fake_like(mode, argument.detach().requires_grad_(argument.requires_grad))


class _Compiled:
    """A function, and what it was compiled for.

    The guards cannot say that two arguments are the same tensor: they see each tensor once, and
    `_repeats` says which arguments are the same.
    """

    __slots__ = ("_looks_same", "_overlaps", "_repeats", "_same_state", "run")

    def __init__(self, run: Callable[..., Any], arguments: Sequence[Tensor], writes: bool) -> None:
        self.run = run
        self._same_state = GlobalStateGuard().check
        self._looks_same = TensorGuards(
            *dict.fromkeys(arguments), dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        repeats = _repeats(arguments)
        self._repeats = repeats if repeats != [*range(len(arguments))] else None
        self._overlaps = overlaps(arguments) if writes else None

    def fits(self, arguments: Sequence[Tensor]) -> bool:
        """Whether the function was compiled for this state and these arguments."""
        seen: Iterable[Tensor] = arguments
        if self._repeats is not None:
            if self._repeats != _repeats(arguments):
                return False
            seen = dict.fromkeys(arguments)
        return (
            self._same_state()
            and self._looks_same(*seen)
            and (self._overlaps is None or self._overlaps == overlaps(arguments))
        )


def _repeats(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor the position at which it is given first."""
    first: dict[Tensor, int] = {}
    return [first.setdefault(tensor, position) for position, tensor in enumerate(tensors)]


class CallSite:
    """A place in a stage's code that calls a compiled graph; most calls are like the one before."""

    __slots__ = ("__name__", "__qualname__", "_graph", "_last")

    def __init__(self, name: str, graph: CompiledGraph) -> None:
        self.__name__ = self.__qualname__ = name
        self._graph = graph
        self._last: _Compiled | None = None

    def __call__(self, *arguments: Tensor) -> Sequence[Tensor]:
        last = self._last
        if last is None or not last.fits(arguments):
            last = self._last = self._graph.compiled(arguments)
        results: Sequence[Tensor] = last.run(*arguments)
        return results


def overlaps(tensors: Sequence[Tensor]) -> list[list[tuple[int, int]]]:
    """Positions and offsets of tensors that share a storage, for each that is shared."""
    storages: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        storages[storage_key(tensor)].append((position, int(tensor.storage_offset())))
    return [places for places in storages.values() if len(places) > 1]
