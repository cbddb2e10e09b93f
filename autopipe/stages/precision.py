"""Run a stage in fp32, in 16 bits with fp32 master weights, or under autocast.

    bf16, fp16         master fp32 --- copied once a step ---> parameter bf16 --> all ops: bf16
                       gradient fp32 <-- cast, then summed, in every micro-batch
    bf16-autocast,     parameter fp32 --- copied once a step ---> bf16 --+
    fp16-autocast                                                        +--> linear --> bf16
                       activation fp32 --- cast where it is used -> bf16 -+   norms, losses: fp32

In both, what the optimizer changes, its state and the sums of gradients stay in fp32 (Micikevicius
et al., ICLR 2018), but where less is asked for: `grad_dtype` sums gradients in 16 bits, which are
cast for the optimizer; `optimizer_dtype` lets it change the parameters of 16 bits themselves.

`bf16` is what Megatron-LM's `--bf16` and FSDP2's mixed precision do: the model is traced with
parameters of 16 bits (`tracing.capture.low_precision`), so activations, what is saved for backward
and what crosses stages are of 16 bits, too. The graph names the parameters that have a master
weight.

Under autocast torch decides op by op. Only its cache of cast weights is replaced, by copies that a
step makes when it begins: torch empties its cache whenever a forward ends, so that each micro-batch
in flight would hold copies of its own; it has one cache for all threads, and caches no frozen
weight. Only torch's own decisions change: a dtype that the model's own code asks for (`x.to(y)`)
was traced in fp32 and stays.

Backward runs outside: its ops then compute in the dtypes of their forwards, as torch advises.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopipe.errors import AutopipeError
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import Graph, Node, State, StateSpec, bytes_at
from autopipe.ir.torch_private import TorchDispatchMode
from autopipe.rewriting.gpu_autocast import autocast
from autopipe.tracing.capture.low_precision import KEPT

AUTOCAST: Mapping[str, torch.dtype] = {
    "bf16-autocast": torch.bfloat16,
    "fp16-autocast": torch.float16,
}
"""The precisions in which only the products of matrices, as torch.autocast decides, are."""

PRECISIONS = ("fp32", *KEPT, *AUTOCAST)
"""All that can be asked for."""


LOWERED = frozenset(
    "linear columns vocabulary_loss matmul mm bmm addmm baddbmm addbmm conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d".split()
)
"""Under autocast, ops that get a parameter's low-precision copy, on every kind of device.

https://docs.pytorch.org/docs/stable/amp.html. What it lowers besides, on some kinds, it casts
itself at each use.
"""

COMPUTED_LOW = LOWERED | {"scaled_dot_product_attention"}
"""Under autocast, ops that compute in low precision: also attention, which has no parameter."""


@dataclass(frozen=True)
class Arithmetic:
    """The precision of one step on one kind of device.

    Attributes:
        dtype: that of parameters' copies; None: there are none.
        autocast: whether ops run under torch.autocast.
        copies: copies of parameters in `dtype`, by the parameter's id; they live for the step.
    """

    dtype: torch.dtype | None
    device_type: str
    autocast: bool = False
    copies: Mapping[int, Tensor] = field(default_factory=dict)


FP32 = Arithmetic(None, "cpu")

_current = threading.local()


def arithmetic(
    precision: str, device: torch.device | str, parameters: Iterable[Tensor] = ()
) -> Arithmetic:
    """Make the arithmetic of a step that begins now, with low-precision copies of `parameters`.

    Under autograd a copy leads back to its parameter, whose gradient grows in fp32 with the
    backward of every micro-batch.

    Args:
        parameters: those of `Lowered.low`; empty if copies must not last, as under ZeRO-3.

    Raises:
        AutopipeError: the precision is unknown.
    """
    if precision not in PRECISIONS:
        raise AutopipeError(
            f"there is no precision {precision!r}", hint=f"one of {', '.join(PRECISIONS)}"
        )
    dtype, kind = copy_dtype(precision), torch.device(device).type
    if dtype is None:
        return Arithmetic(None, kind)
    copies = {id(parameter): _copy(parameter, dtype) for parameter in parameters}
    return Arithmetic(dtype, kind, precision in AUTOCAST, copies)


def _copy(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in `dtype`; if the parameter has this dtype (its master is sharded), a view, so that
    gradients of all its uses are added in 16 bits before they reach it, as those of a copy are."""
    return parameter.view_as(parameter) if parameter.dtype == dtype else parameter.to(dtype)


def copy_dtype(precision: str) -> torch.dtype | None:
    """The dtype of the copies that a step makes of parameters; None: it makes none."""
    return KEPT.get(precision) or AUTOCAST.get(precision)


def copied(graph: Graph, nodes: Iterable[Node], precision: str) -> tuple[str, ...]:
    """The names of the parameters that nodes read as copies in 16 bits, in the order of use."""
    names = (value.name for node in nodes for value in read_as_copies(graph, node, precision))
    return tuple(dict.fromkeys(names))


def read_as_copies(graph: Graph, node: Node, precision: str) -> list[State]:
    """The parameters that a node reads as copies: of master weights, or under autocast."""
    lowered = precision in AUTOCAST and node.autocast is None and node.short in LOWERED

    def as_copy(state: StateSpec) -> bool:
        cast = lowered and state.kind == "parameter" and state.spec.dtype == torch.float32
        return cast or state.master is not None

    states = [v for v in dict.fromkeys(node.values()) if isinstance(v, State)]
    # A copy for the whole step would miss writes of forward.
    return [v for v in states if as_copy(graph.states[v.name]) and v not in analyse(graph).writers]


def copy_bytes(state: StateSpec) -> int:
    """Bytes of a parameter's copy in 16 bits."""
    return bytes_at(state.spec, 1) * 2 // state.spec.dtype.itemsize


@contextmanager
def computing(how: Arithmetic) -> Iterator[None]:
    """Within, compute in this precision; use it around each forward, never around a backward."""
    before, _current.how = current(), how
    try:
        if how.autocast:
            with autocast(how.device_type, how.dtype, cached=False):
                yield
        else:
            yield
    finally:
        _current.how = before


def current() -> Arithmetic:
    """The arithmetic of this thread now."""
    return getattr(_current, "how", FP32)


def low(parameter: Tensor) -> Tensor:
    """The step's low-precision copy of a parameter.

    If there is none: under autocast the parameter itself, which is cast where it is used, else a
    copy for this use.
    """
    how = current()
    found = how.copies.get(id(parameter), parameter)
    return found if how.autocast or how.dtype is None else found.to(how.dtype)


_NORMS = (
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_group_norm.default,
    torch.ops.aten.native_batch_norm.default,
)


def saves_wide(nodes: Iterable[Node], precision: str) -> bool:
    """Whether one of these nodes may be a norm of 16 bits, which saves statistics in fp32."""
    norms = [node for node in nodes if "norm" in node.op]
    made = {spec.dtype for node in norms for spec in node.outputs if spec is not None}
    return bool(norms) and (precision != "fp32" or not made.isdisjoint(KEPT.values()))


def wide_statistics(wanted: bool) -> AbstractContextManager[object]:
    """`WideStatistics` if `saves_wide` says so; it slows down all ops within."""
    return WideStatistics() if wanted else nullcontext()


class WideStatistics(TorchDispatchMode):
    """Makes norms on fake tensors save statistics of the same dtype as norms on real ones.

    The statistics of a bf16 input are fp32 where the norm's weights are; fake ones are bf16.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _NORMS:
            return result
        _, *others = (arg for arg in args if isinstance(arg, Tensor))
        made, *statistics = result
        wide = any(other.dtype == torch.float32 for other in others)
        return made, *(s.to(torch.float32) if wide else s for s in statistics)
