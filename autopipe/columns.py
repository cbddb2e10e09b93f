"""Column-parallel layers of one input as one op, whose backward sends while it computes.

    forward      x ------> x wq', x wk', x wv'                         nothing is sent
    backward     dx = dq wq + dk wk + dv wv    a part of the sum on each rank
                 begin its all-reduce    |=================|
                 dwq, dwk, dwv              matmuls
                 wait for it                               |

That is f of Megatron-LM with the overlap of its `LinearWithGradAccumulationAndAsyncCommunication`.
The gradients of the input and of the weights are ops of their own, so that zero-bubble schedules
can take them apart.

In mixed precision the weights are low copies: what x is multiplied with, and what is sent, is low.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from autopipe.collectives import CONVERT, axis_of
from autopipe.graph import Graph, Node, Ref, State, Value, swap, values_in
from autopipe.placements import I, R

COLUMNS = "autopipe.columns.default"

_waiting: dict[int, Callable[[], None]] = {}
"""What is under way, by the memory that it comes into."""


@torch.library.custom_op("autopipe::columns", mutates_args=())
def columns(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], axis: str
) -> list[Tensor]:
    """x [..., k] with each weight [n, k] of this rank, as `torch.nn.functional.linear`.

    Args:
        x: replicated; its gradient is summed over the ranks of the axis.
        biases: one for each weight, or none.
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
    """The sum of gradient @ weight, whose all-reduce has begun; `finish_` waits for it."""
    first, *others = zip(gradients, weights, strict=True)
    total = first[0] @ first[1]
    for gradient, weight in others:
        total += gradient @ weight
    _waiting[total.data_ptr()] = axis_of(axis).begin_all_reduce(total)
    return total


@begin_input_gradient.register_fake
def _(gradients: Sequence[Tensor], weights: Sequence[Tensor], axis: str) -> Tensor:
    return gradients[0].new_empty((*gradients[0].shape[:-1], weights[0].shape[1]))


@torch.library.custom_op("autopipe::finish_", mutates_args=("x",))
def finish_(x: Tensor) -> None:
    """Wait until what has begun in `x` is there."""
    _waiting.pop(x.data_ptr())()


@finish_.register_fake
def _(x: Tensor) -> None:
    return None


def fuse(graph: Graph) -> Graph:
    """The graph with one node for all column-parallel layers that share a conversion from I to R.

    Only layers whose weights are the graph's own are taken: what is made by a node may not be there
    yet. Under an autocast of the model's own a layer stays as it is.
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
            args = swap(made.args, values)
            kwargs = {key: swap(arg, values) for key, arg in made.kwargs.items()}
            nodes.append(replace(made, args=args, kwargs=kwargs))
    outputs = tuple(swap(output, values) for output in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def _is_column(graph: Graph, conversion: Node, layer: Node) -> bool:
    own = [arg for arg in layer.args[1:] if arg is not None]
    return (
        layer.op == "aten.linear.default"
        and layer.args[0] == Ref(conversion.name)
        and all(isinstance(arg, State) and graph.states[arg.name].trainable for arg in own)
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
    rows = x.reshape(-1, x.shape[-1])
    flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
    of_weights = [gradient.t() @ rows for gradient in flat]
    of_biases = [gradient.sum(0) for gradient in flat[: ctx.biased]]
    finish_(total)
    return total.to(ctx.dtype), of_weights, of_biases, None


columns.register_autograd(_back, setup_context=_remember)
