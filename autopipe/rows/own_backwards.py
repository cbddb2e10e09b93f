"""Run each custom Function by itself, on made-up numbers: what does its backward depend on?

The last forward, wherever Python kept something of it: that is refused, since in a pipeline forward
has run on later micro-batches by then.

    forward(ctx, x):          Scale.mean = x.mean()
    backward(ctx, gradient):  return gradient * Scale.mean

The gradient that it is given, in another way than in proportion: gradients of micro-batches do not
sum to that of the whole batch then.

    backward(ctx, gradient):  return gradient, ctx.y * 1e-4       RWKV's penalty of large logits
    nn.Embedding(words, width, scale_grad_by_freq=True)           a word's share of the micro-batch

The loss of one of m micro-batches is 1 / m of the batch's, and so are the gradients that it sends
back: but not those of such a backward, which are added m times. That is so too in one process that
accumulates gradients, and a Function that clips gradients means no harm, so it is said.

A Function gets two gradients there, one twice the other. An embedding that divides by how often a
word occurs says so in an argument.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopipe.errors import CaptureError
from autopipe.ir.graph import Graph, Node, Value, arguments, bytes_at, resolve, shape_at
from autopipe.ir.opaque_ops import FUNCTION_OP
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_private import is_fake
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
            return (
                f"{node.place}: the backward of {_name(node)} does not scale with the gradient "
                "that it is given, which is a share of the whole batch's in each micro-batch"
                f"{_WHOLE}"
            )
    return None


def check(graph: Graph) -> None:
    """Refuse a Function whose backward computes with what its last forward has kept.

    Raises:
        CaptureError: names the Function and the user's line.
    """
    for node in graph.nodes:
        if node.op == FUNCTION_OP and _reads_the_last_forward(graph, node):
            raise CaptureError(
                f"{node.place}: the backward of {_name(node)} computes with what an earlier call "
                "has kept in Python: in a pipeline forward has run on later micro-batches by then",
                hint="keep it in ctx: ctx.save_for_backward(x) for tensors, ctx.mean = mean else",
            )


def _name(node: Node) -> str:
    return str(arguments(node)["call"]).partition("(")[0].rpartition(".")[2]


def _reads_the_last_forward(graph: Graph, node: Node) -> bool:
    """Whether another forward, before the backward, changes the gradients."""
    applied = _Alone(graph, node)
    alone, behind = (applied.gradients((1.0,), later) for later in (0, 2))
    return applied.kept or (bool(alone and behind) and _differ(alone[0], behind[0]))


def _adds_a_whole(graph: Graph, node: Node) -> bool:
    """Whether half the gradient does not give half the gradients."""
    found = _Alone(graph, node).gradients((1.0, 0.5))
    return bool(found) and _differ([w if w is None else w / 2 for w in found[0]], found[1])


_Gradients = Sequence[Tensor | None]


def _differ(expected: _Gradients, found: _Gradients) -> bool:
    pairs = zip(expected, found, strict=True)
    return any(off(e, f, CLOSE) for e, f in pairs if e is not None and f is not None)


class _Alone:
    """A Function as a node of a graph applies it, on made-up numbers.

    `kept` tells whether it has computed with a tensor that it keeps from its trace.
    """

    kept = False

    def __init__(self, graph: Graph, node: Node) -> None:
        self._op, self._given = resolve(node.op), arguments(node)
        values = (value for value in self._given["tensors"] if isinstance(value, Value))
        self._specs = [graph.spec(value) for value in values]

    def gradients(self, shares: Sequence[float], later: int = 0) -> list[_Gradients]:
        """The gradients from shares of the results' gradients; none if the tensors are large, or
        the user's code raises on numbers that it never has.

        Args:
            later: how many forwards on other numbers come before backward.
        """
        if sum(bytes_at(spec, ROWS) for spec in self._specs) > MOST_BYTES:
            return []
        with torch.random.fork_rng(devices=[]):
            try:
                tensors, results = self._forward(seed=0)
                for seed in range(later):
                    self._forward(seed + 1)
                torch.manual_seed(1)
                seeds = [torch.randn_like(r) if r.requires_grad else None for r in results]
                found: list[_Gradients] = [
                    _gradients(tensors, results, seeds, share) for share in shares
                ]
            except Exception:  # whatever the user's code raises
                return []
        self.kept |= any(map(is_fake, tensors_in((results, found))))
        return [] if self.kept else found

    def _forward(self, seed: int) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Numbers of a seed, and the results of a forward on them."""
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        tensors = [drawn(shape_at(s, ROWS), s.dtype, torch.randn, generator) for s in self._specs]
        for tensor in tensors:
            tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        return tensors, self._op(tensors, self._given["call"], self._given["random"])


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
