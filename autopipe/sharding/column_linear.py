"""Fuse column-parallel layers of a block with one input into one op, whose backward overlaps its
all-reduce.

    forward      x ------> x wq', x wk', x wv'                         nothing is sent
    backward     dx = dq wq + dk wk + dv wv    a part of the sum on each rank
                 begin its all-reduce    |=================|
                 dwq, dwk, dwv              matmuls
                 wait for it                               |

That is f of Megatron-LM with the overlap of its `LinearWithGradAccumulationAndAsyncCommunication`.
The gradients of the input and of the weights are ops of their own, so that zero-bubble schedules
can take them apart.

In mixed precision the weights are low copies: what x is multiplied with, and what is sent, is low.

Two ops begin the sum and wait for it. Between them stands an entry that holds the sum's own tensor:
as long as it is there, no other tensor comes into the same memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from autopipe.ir.blocks import Block
from autopipe.ir.graph import Graph, Node, Ref, State, Value, swap, values_in
from autopipe.planfile.placements import I, R
from autopipe.sharding.collectives import CONVERT, axis_of
from autopipe.util import dtypes

COLUMNS = "autopipe.columns.default"


@dataclass(frozen=True, eq=False)
class _Sum:
    """An all-reduce under way.

    Attributes:
        total: the tensor that it sums in place.
        wait: returns when the sum is in `total`.
    """

    axis: str
    total: Tensor
    wait: Callable[[], None]


_under_way: list[_Sum] = []


@contextmanager
def all_sums_finished() -> Iterator[None]:
    """Within, each sum that begins is finished; afterwards none is under way, also after an error.

    Raises:
        RuntimeError: the block has ended, and nothing has waited for a sum that began in it.
    """
    try:
        yield
        if _under_way:
            raise RuntimeError(
                f"the step has ended, and nothing has waited for {_listed()}\n"
                "hint: each autopipe.begin_input_gradient of a graph needs its autopipe.finish_"
            )
    finally:
        _under_way.clear()


def _listed() -> str:
    """The sums under way, for a message."""
    sums = [f"the sum of {_described(sum.total)} over {sum.axis!r}" for sum in _under_way]
    return ", ".join(sums) or "no sum"


def _described(x: Tensor) -> str:
    return f"{list(x.shape)} {dtypes.name_of(x.dtype)}"


@torch.library.custom_op("autopipe::columns", mutates_args=())
def columns(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], axis: str
) -> list[Tensor]:
    """Multiply x [..., k] by each weight [n, k] of this rank; gives a list of [..., n].

    Args:
        x: replicated; its gradient is summed over the ranks of the axis.
        biases: one [n] for each weight, or an empty sequence.
    """
    x = x.to(weights[0].dtype)
    layers = zip_longest(weights, biases)
    return [torch.nn.functional.linear(x, weight, bias) for weight, bias in layers]


@columns.register_fake
def _(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], axis: str) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=weight.dtype) for weight in weights]


@torch.library.custom_op("autopipe::begin_input_gradient", mutates_args=())
def begin_input_gradient(
    gradients: Sequence[Tensor], weights: Sequence[Tensor], axis: str
) -> Tensor:
    """Sum gradient [..., n] @ weight [n, k], and begin its all-reduce; `finish_` waits for it.

    Of complex weights it is the conjugate that gradients are multiplied with.
    """
    first, *others = zip(gradients, weights, strict=True)
    total = first[0] @ first[1].conj()
    for gradient, weight in others:
        total += gradient @ weight.conj()
    _under_way.append(_Sum(axis, total, axis_of(axis).begin_all_reduce(total)))
    return total


@begin_input_gradient.register_fake
def _(gradients: Sequence[Tensor], weights: Sequence[Tensor], axis: str) -> Tensor:
    return gradients[0].new_empty((*gradients[0].shape[:-1], weights[0].shape[1]))


@torch.library.custom_op("autopipe::finish_", mutates_args=("x",))
def finish_(x: Tensor) -> None:
    """Wait for the sum over the ranks in `x`, the tensor that `begin_input_gradient` has given.

    Raises:
        RuntimeError: no sum is under way in this very memory, in this shape.
    """
    # By the memory, not first in, first out: sums of two axes end in any order.
    found = next((sum for sum in tuple(_under_way) if sum.total.is_set_to(x)), None)
    if found is None:
        raise RuntimeError(
            f"autopipe.finish_ waits for a sum in a tensor of {_described(x)} that none has begun "
            f"in; under way: {_listed()}\n"
            "hint: between autopipe.begin_input_gradient and autopipe.finish_ a pass over the "
            "graph may neither copy the tensor nor view it in another shape"
        )
    _under_way.remove(found)
    found.wait()


@finish_.register_fake
def _(x: Tensor) -> None:
    return None


def fuse(graph: Graph, blocks: Mapping[str, Block]) -> Graph:
    """Fuse all column-parallel layers that share a conversion from I to R into one node.

    Only layers whose weights are states are fused: a weight that a node makes may not exist yet.
    Those of a vector, or with a bias of each row, stay unchanged: they have no columns.
    Layers under an autocast of the model stay unchanged. So do layers of several blocks, which cuts
    divide: each block of a decoder reads the encoder's output, by weights of its own stage.

    Args:
        blocks: the block of each node that is in one, by the node's name.
    """
    users: dict[Value, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for value in dict.fromkeys(node.values()):
            users[value].append(node)
    for output in values_in(graph.outputs):
        users[output].append(graph.nodes[-1])
    together: dict[str, Node] = {}
    values: dict[Value, Value] = {}
    for node in graph.nodes:
        layers = users[Ref(node.name)]
        if node.op != CONVERT or node.args[2:4] != (I, R):
            continue
        if not layers or not all(_is_column(graph, node, layer) for layer in layers):
            continue
        if len({blocks.get(layer.name) for layer in layers}) > 1:
            continue
        biases = tuple(layer.args[2] for layer in layers if _bias(layer) is not None)
        if len(biases) not in (0, len(layers)):
            continue
        first = layers[0]
        together[node.name] = replace(
            first,
            op=COLUMNS,
            args=(node.args[0], tuple(layer.args[1] for layer in layers), biases, node.args[1]),
            kwargs={},
            outputs=tuple(layer.outputs[0] for layer in layers),
            packed=True,
        )
        for number, layer in enumerate(layers):
            together[layer.name] = node
            values[Ref(layer.name)] = Ref(first.name, number)
    nodes = []
    for node in graph.nodes:
        made = together.get(node.name, node)
        if made is node or made.op == COLUMNS:  # a layer itself stands for its conversion
            nodes.append(made.reading(values))
    outputs = tuple(swap(output, values) for output in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def _is_column(graph: Graph, conversion: Node, layer: Node) -> bool:
    own = [arg for arg in layer.args[1:] if arg is not None]
    return (
        layer.op == "aten.linear.default"
        and layer.args[0] == Ref(conversion.name)
        and all(
            isinstance(arg, State)
            and graph.states[arg.name].trainable
            and len(graph.spec(arg).shape) == rank
            for arg, rank in zip(own, (2, 1), strict=False)
        )
        and layer.grad
        and layer.autocast is None
    )


def _bias(layer: Node) -> object:
    return layer.args[2] if len(layer.args) > 2 else None


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, ctx.axis = inputs
    ctx.dtype, ctx.biased = x.dtype, len(biases)
    ctx.save_for_backward(x.to(weights[0].dtype), *weights)


def _back(ctx: Any, gradients: Sequence[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    total = begin_input_gradient(list(gradients), weights, ctx.axis)
    rows = x.reshape(-1, x.shape[-1]).conj()  # a real tensor is its own
    flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
    of_weights = [gradient.t() @ rows for gradient in flat]
    of_biases = [gradient.sum(0) for gradient in flat[: ctx.biased]]
    finish_(total)
    return total.to(ctx.dtype), of_weights, of_biases, None


columns.register_autograd(_back, setup_context=_remember)
