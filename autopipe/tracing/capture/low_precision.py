"""Trace a model as it computes in 16 bits, with fp32 master weights.

    batch fp32 --cast--> model: parameters, activations bf16 --cast--> outputs fp32 --> loss fp32

Parameters, inputs and outputs of the model are cast, as FSDP2's mixed precision does
(`MixedPrecisionPolicy(param_dtype, cast_forward_inputs, output_dtype)`). Buffers stay in fp32:
running statistics and frequencies lose too much in 16 bits. The exception is a buffer that is never
written and meets an activation, so that the result would be of fp32: it is read in 16 bits, as
`model.to(torch.bfloat16)` has it:

    x + self.positions    bf16 + fp32 = fp32, which no linear layer takes    bf16 + bf16 = bf16

Casts in the model's own code (`.float()` around a norm or a loss) are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopipe.eager.assigned_buffers import put
from autopipe.errors import CaptureError
from autopipe.ir.dataflow import written_parameters
from autopipe.ir.graph import Graph, Node, Ref, State, Value
from autopipe.ir.op_costs import RULES
from autopipe.ir.op_seconds import rate_name
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_private import tree_map, version
from autopipe.planfile.contents import Plan
from autopipe.util import dtypes

_Tree = TypeVar("_Tree")

MASTER = torch.float32
"""The dtype of master weights."""


class SixteenBits(NamedTuple):
    """The dtypes in which a model is trained whose parameters and activations are of 16 bits.

    Args:
        dtype: the dtype of parameters, activations and matrix products.
        optimizer: the dtype of the tensors that the optimizer changes, and of its state: `MASTER`
            if parameters have fp32 master weights, else `dtype`.
        gradients: the dtype in which gradients are summed over micro-batches and replicas.
        buffers: names of the fp32 buffers that are read in `dtype`.
    """

    dtype: torch.dtype
    optimizer: torch.dtype = MASTER
    gradients: torch.dtype = MASTER
    buffers: tuple[str, ...] = ()


KEPT: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The precisions in which parameters, activations and products are all of one 16-bit dtype."""


def kept(precision: str, optimizer: str = "fp32", gradients: str = "fp32") -> SixteenBits | None:
    """The dtypes in which a model is traced for a precision; None: those it is built in.

    Args:
        optimizer, gradients: as `Plan.optimizer_dtype` and `Plan.grad_dtype`.
    """
    if precision not in KEPT:
        return None
    wide = {"fp32": MASTER}
    optimized, summed = ({**KEPT, **wide}[word] for word in (optimizer, gradients))
    return SixteenBits(KEPT[precision], optimized, summed)


def kept_by(plan: Plan) -> SixteenBits | None:
    """The dtypes in which a plan's model is traced; None: those it is built in."""
    found = kept(plan.precision, plan.optimizer_dtype, plan.grad_dtype)
    return found and found._replace(buffers=plan.low_buffers)


WIDE = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Modules whose parameters stay in fp32, as their running statistics do: torch's kernels take both
in one dtype, beside activations of 16 bits."""


@contextmanager
def parameters_in(model: nn.Module, kept: SixteenBits | None) -> Iterator[None]:
    """Within, the model's fp32 parameters are of 16 bits; with None they stay as they are.

    Tied ones stay tied.
    """
    wide = lower(model, kept.dtype) if kept is not None else []
    try:
        yield
    finally:
        for module, name, parameter in wide:
            setattr(module, name, parameter)


def lower(model: nn.Module, dtype: torch.dtype) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Replace a model's fp32 parameters by parameters of `dtype`.

    Returns the old parameters, as (module, name in it, parameter).
    """
    replacements: dict[int, nn.Parameter] = {}
    wide = [
        (module, name, parameter)
        for module in model.modules()
        if not isinstance(module, WIDE)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.dtype == MASTER
    ]
    for module, name, parameter in wide:
        if id(parameter) not in replacements:
            low = parameter.detach().to(dtype)
            replacements[id(parameter)] = nn.Parameter(low, parameter.requires_grad)
        setattr(module, name, replacements[id(parameter)])
    return wide


@contextmanager
def buffers_in(model: nn.Module, kept: SixteenBits | None) -> Iterator[None]:
    """Within, which is around a forward, the buffers of `SixteenBits.buffers` are of 16 bits.

    Raises:
        CaptureError: forward writes one of them.
    """
    if kept is None or not kept.buffers:
        yield
        return
    originals = {name: model.get_buffer(name) for name in kept.buffers}
    low = {name: buffer.to(kept.dtype) for name, buffer in originals.items()}
    versions = {name: version(buffer) for name, buffer in low.items()}
    try:
        put(model, low)
        yield
        for name, buffer in low.items():
            if model.get_buffer(name) is not buffer or version(buffer) != versions[name]:
                raise CaptureError(
                    f"forward writes the buffer {name!r}, and reads it beside activations of "
                    f"{dtypes.name_of(kept.dtype)}",
                    hint="cast what is read, self.table.to(x.dtype); or the precision "
                    f"{rate_name(kept.dtype)}-autocast",
                )
    finally:
        put(model, originals)


class Meetings(TorchFunctionMode):
    """Notes the fp32 buffers that meet activations of 16 bits while a model runs.

    A part of a buffer counts as the buffer; a value computed from it does not: the frequencies in
    `(self.frequencies * positions).cos()` would lose too much.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._model, self._dtype = model, dtype
        self._found = set[str]()
        self._alive: list[Tensor] = []  # an id may be taken again when a tensor is gone
        wide = [(name, buffer) for name, buffer in model.named_buffers() if buffer.dtype == MASTER]
        self._names = {id(buffer): {name} for name, buffer in wide}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tensors_in((args, kwargs or {})) if leaf.is_floating_point()]
        names = [self._names.get(id(tensor)) for tensor in given]
        called = getattr(func, "__name__", "")
        in_place = called.endswith("_") and not called.endswith("__")
        if any(tensor.dtype == self._dtype for tensor in given):
            if not called.endswith("norm") and not (in_place and names[0]):
                self._found |= set().union(*filter(None, names))
        result = func(*args, **(kwargs or {}))
        if called in _TAKING_PARTS and len(names) == 1 and names[0]:
            for tensor in tensors_in(result):
                self._names[id(tensor)] = names[0]
                self._alive.append(tensor)
        return result

    def names(self) -> list[str]:
        """The buffers that have met some, and the equally named ones of other layers."""
        alike = {_without_numbers(name) for name in self._found}
        wide = (name for name, buffer in self._model.named_buffers() if buffer.dtype == MASTER)
        return [name for name in wide if _without_numbers(name) in alike]


_TAKING_PARTS = frozenset(
    "__getitem__ index_select gather embedding view reshape expand expand_as unsqueeze squeeze "
    "transpose permute flatten unflatten narrow select chunk split unbind contiguous clone repeat "
    "to float detach".split()
)
"""Functions that compute nothing: their results are values of their argument."""


def read_low(names: Sequence[str], dtype: torch.dtype) -> str:
    """The line for the user about buffers that are read in 16 bits."""
    which = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    low = dtypes.name_of(dtype)
    return f"buffer {which}: read in {low} beside activations, as model.to(torch.{low}) has it"


def _without_numbers(name: str) -> str:
    """`h.3.mask` -> `h.#.mask`, as of every other layer."""
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))


def cast(tree: _Tree, old: torch.dtype, new: torch.dtype) -> _Tree:
    """The tree with its tensors of one dtype cast to another."""

    def recast(leaf: Any) -> Any:
        return leaf.to(new) if isinstance(leaf, Tensor) and leaf.dtype == old else leaf

    found: _Tree = tree_map(recast, tree)
    return found


def check_operands(graph: Graph, dtype: torch.dtype) -> None:
    """Refuse a product of tensors of two dtypes, as torch does when it computes.

    Raises:
        CaptureError: names the user's line and both dtypes.
    """
    for node in graph.nodes:
        if _in_autocast(node):
            continue  # the model's own region, in which torch casts operands
        operands = [graph.spec(value) for value in node.values()]
        found = list(dict.fromkeys(s.dtype for s in operands if s.dtype.is_floating_point))
        # A norm takes an input of 16 bits beside weights in fp32, and not the other way round.
        mixed = found == [MASTER, dtype] if node.short.endswith("norm") else len(found) > 1
        if mixed and (node.short in RULES or node.short.endswith("norm")):
            first, second, *_ = map(dtypes.name_of, found)
            buffer = next(filter(None, (_wide_buffer(graph, v) for v in node.values())), None)
            kept = None if buffer is None else f"the buffer {buffer!r} stays in float32"
            raise CaptureError(
                f"{node.place + ': ' if node.place else ''}{node.short} gets {first} and {second}: "
                f"parameters are of {dtypes.name_of(dtype)} here, and "
                f"{kept or 'the model casts its input'}",
                hint=_hint(graph, dtype),
            )


def _in_autocast(node: Node) -> bool:
    return node.autocast is not None and node.autocast.enabled


def _wide_buffer(graph: Graph, value: Value) -> str | None:
    """The fp32 buffer because of which a value is of fp32; None: the model casts it, or there is
    none. torch computes in fp32 where a tensor of 16 bits meets one of fp32.
    """
    pending, seen = [value], set[Value]()
    while pending:
        value = pending.pop()
        if value in seen or graph.spec(value).dtype != MASTER:
            continue
        seen.add(value)
        if isinstance(value, State) and graph.states[value.name].kind == "buffer":
            return value.name
        if isinstance(value, Ref):
            pending += graph.nodes[graph.index[value.node]].values()
    return None


def check_followers(graph: Graph, dtype: torch.dtype) -> None:
    """Refuse a parameter of 16 bits that forward writes, such as a teacher's average of a student.

    Rounding to 16 bits loses a small step, 0.999 * old + 0.001 * new.

    Raises:
        CaptureError: names the user's line and the parameter.
    """
    for name, node in written_parameters(graph).items():
        raise CaptureError(
            f"{node.place}: forward writes the parameter {name!r}, which is of "
            f"{dtypes.name_of(dtype)} here: what it adds to it is rounded to 16 bits",
            hint=f"the precision {rate_name(dtype)}-autocast, under which parameters stay in fp32; "
            "or keep it in a buffer, which does so too",
        )


def _hint(graph: Graph, dtype: torch.dtype) -> str:
    if any(map(_in_autocast, graph.nodes)):
        return (
            "the model says itself, by torch.autocast, what is computed in 16 bits: plan it with "
            "precision fp32, under which its regions hold and all else is of fp32"
        )
    return (
        "cast to the weight's dtype, x.to(self.weight.dtype); or the precision "
        f"{rate_name(dtype)}-autocast, under which torch casts operands itself"
    )


def with_masters(graph: Graph, kept: SixteenBits) -> Graph:
    """The graph whose trainable parameters of 16 bits are copies of fp32 master weights.

    Frozen parameters have no masters: no optimizer changes them.
    """
    if kept.optimizer == kept.dtype:
        return graph
    summed = None if kept.gradients == MASTER else kept.gradients
    states = {
        name: replace(state, master=MASTER, gradient=summed)
        if state.trainable and state.spec.dtype == kept.dtype
        else state
        for name, state in graph.states.items()
    }
    return replace(graph, states=states)
