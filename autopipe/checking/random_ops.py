"""Make plain PyTorch draw the random numbers that the nodes of a plan draw.

    a plan     each random node seeds its op by (run, step, micro-batch, name of the node)
    eager      the k-th random op of a micro-batch is the k-th random node of the graph

so a random op of the user's own module is seeded as its node is, and the two can be equal bit by
bit, dropout included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopipe.ir.dataflow import is_random
from autopipe.ir.graph import Graph
from autopipe.ir.torch_private import TorchDispatchMode
from autopipe.util.seeding import seed


class Unmatched(Exception):
    """A module's random ops are not one for each random node of its graph."""


class Unrepeatable(Exception):
    """One process cannot draw the numbers that the ranks of a plan draw."""


RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Ops that draw once for each of their layers."""


def random_nodes(graph: Graph) -> list[str]:
    """The random nodes of a graph, in its order."""
    return [node.name for node in graph.nodes if is_random(node)]


def repeatable(graph: Graph) -> bool:
    """Whether each random node draws once, in forward alone: none is recurrent or checkpointed."""
    found = [node for node in graph.nodes if is_random(node)]
    return not any(node.again or node.short in RECURRENT for node in found)


class Drawing(TorchDispatchMode):
    """Within, the random ops of one micro-batch's forward draw as the nodes `names` do.

    Args:
        names: None where they are not known yet: any random op raises.

    Raises:
        Unmatched: there are more random ops than names.
    """

    def __init__(self, names: Sequence[str] | None, step: tuple[int, int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._step = step
        self.drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        generator = torch.default_generator
        left = self._names is not None and self.drawn < len(self._names)
        if self._names is not None and left:
            generator.manual_seed(seed(*self._step, self._names[self.drawn]))
        before = generator.get_state()
        found = func(*args, **(kwargs or {}))
        if not torch.equal(generator.get_state(), before):  # attention without dropout draws none
            if not left:
                raise Unmatched
            self.drawn += 1
        return found
