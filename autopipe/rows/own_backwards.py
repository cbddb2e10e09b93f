"""Find backwards whose gradients of micro-batches do not sum to that of the whole batch.

    backward(ctx, gradient):  return gradient, ctx.y * 1e-4       RWKV's penalty of large logits
    nn.Embedding(words, width, scale_grad_by_freq=True)           a word's share of the micro-batch

The loss of one of m micro-batches is 1 / m of the batch's, and so are the gradients that it sends
back: but not those of such a backward, which are added m times. That is so too in one process that
accumulates gradients, and a Function that clips gradients means no harm, so it is said.

Each Function runs by itself, on made-up numbers and with two gradients, one twice the other. An
embedding that divides by how often a word occurs says so in an argument.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopipe.ir.graph import Graph, Node, Value, arguments, bytes_at, resolve, shape_at
from autopipe.ir.opaque_ops import FUNCTION_OP
from autopipe.rows.row_runs import ROWS, drawn, off

MOST_BYTES = 2**28
"""Limit on the bytes of a Function's tensors on these rows."""

_WHOLE = (
    ": their sum may be another than the whole batch gives, as where one process accumulates "
    "gradients; --micro-batches 1 --dp 1 leaves the batch whole"
)

CLOSE = 1e-3
"""Tolerance, as a share of the largest entry: it may compute in 16 bits inside."""


def remark(graph: Graph) -> str | None:
    """A line for the user that names the first such op; None: there is none, or it is a Function
    that raises on made-up numbers, draws random ones, or is large."""
    for node in graph.nodes:
        if "embedding" in node.op and arguments(node).get("scale_grad_by_freq"):
            return (
                f"{node.place}: scale_grad_by_freq divides a word's gradient by how often its own "
                f"micro-batch has the word{_WHOLE}"
            )
        if node.op == FUNCTION_OP and not arguments(node)["random"] and _adds_a_whole(graph, node):
            name = str(arguments(node)["call"]).partition("(")[0].rpartition(".")[2]
            return (
                f"{node.place}: the backward of {name} does not scale with the gradient that it "
                f"is given, which is a share of the whole batch's in each micro-batch{_WHOLE}"
            )
    return None


def _adds_a_whole(graph: Graph, node: Node) -> bool:
    """Whether half the gradient does not give half the gradients."""
    given = arguments(node)
    specs = [graph.spec(value) for value in given["tensors"] if isinstance(value, Value)]
    if sum(bytes_at(spec, ROWS) for spec in specs) > MOST_BYTES:
        return False
    generator = torch.Generator().manual_seed(0)
    tensors = [drawn(shape_at(s, ROWS), s.dtype, torch.randn, generator) for s in specs]
    for tensor in tensors:
        tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
    with torch.random.fork_rng(devices=[]):
        try:
            results = resolve(node.op)(tensors, given["call"], given["random"])
            seeds = [torch.randn_like(r) if r.requires_grad else None for r in results]
            whole, half = (_gradients(tensors, results, seeds, share) for share in (1.0, 0.5))
        except Exception:  # whatever the user's code raises on numbers that it never has
            return False
    pairs = zip(whole, half, strict=True)
    return any(off(w / 2, h, CLOSE) for w, h in pairs if w is not None and h is not None)


def _gradients(
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    seeds: Sequence[Tensor | None],
    share: float,
) -> tuple[Tensor | None, ...]:
    """The gradients of `tensors` from a share of the results' gradients `seeds`."""
    torch.manual_seed(0)  # a backward may draw, as one that rounds by chance
    seeded = [(r, seed * share) for r, seed in zip(results, seeds, strict=True) if seed is not None]
    return torch.autograd.grad(
        [result for result, _ in seeded],
        [tensor for tensor in tensors if tensor.requires_grad],
        [seed for _, seed in seeded],
        retain_graph=True,
        allow_unused=True,
    )
