"""Make plain PyTorch draw the random numbers that the nodes of a plan draw.

    a plan     each random node seeds its op by (run, step, micro-batch, name of the node)
    eager      the k-th random op of a micro-batch is the k-th random node of the graph

so a random op of the user's own module is seeded as its node is, and the two can be equal bit by
bit, dropout included. A call that runs as it is (`opaque.regions`) is one node, whatever it draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from autopipe.frontend.loss import Loss
from autopipe.ir.dataflow import is_random
from autopipe.ir.graph import REGION_OP
from autopipe.ir.torch_private import TorchDispatchMode
from autopipe.opaque.calls.sites import Site, SiteCall, site_of, standing_in, with_loss
from autopipe.tracing.traced import Trace
from autopipe.util.seeding import seed


class Unmatched(Exception):
    """Raised where a module's random ops do not match the random nodes of its graph one by one."""


class Unrepeatable(Exception):
    """Raised where one process cannot draw the numbers that the ranks of a plan draw."""


RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Ops that draw once for each of their layers."""


class RandomNodes(NamedTuple):
    """The random nodes of a graph, in its order.

    Attributes:
        calls: for each call that runs as it is (the k-th of a site), the node's name; None: it
            draws nothing, or its results are unused.
    """

    names: Sequence[str] = ()
    calls: Mapping[tuple[Site, int], str | None] = MappingProxyType({})


def random_nodes(traced: Trace) -> RandomNodes:
    """The random nodes of a traced model.

    Raises:
        Unrepeatable: a node draws more than once, or again in backward: a recurrent op, a
            checkpoint.
    """
    found = [node for node in traced.graph.nodes if is_random(node)]
    if any(node.again or node.short in RECURRENT for node in found):
        raise Unrepeatable
    of_calls = {str(node.args[-1]): node.name for node in found if node.op == REGION_OP}
    calls = {(site_of(r), r.call): of_calls.get(r.name) for r in traced.regions}
    return RandomNodes([node.name for node in found], calls)


class Drawing(TorchDispatchMode):
    """Within, the random ops of one micro-batch's forward draw as random nodes do.

    Args:
        nodes: the random nodes; None: not known yet, and any random op raises.

    Raises:
        Unmatched: there are more random ops than nodes.
    """

    def __init__(self, nodes: RandomNodes | None, step: tuple[int, int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._nodes = nodes
        self._step = step
        self._within = False
        self.drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags or self._within:
            return func(*args, **(kwargs or {}))
        generator = torch.default_generator
        left = self._nodes is not None and self.drawn < len(self._nodes.names)
        if self._nodes is not None and left:
            generator.manual_seed(seed(*self._step, self._nodes.names[self.drawn]))
        before = generator.get_state()
        found = func(*args, **(kwargs or {}))
        if not torch.equal(generator.get_state(), before):  # attention without dropout draws none
            if not left:
                raise Unmatched
            self.drawn += 1
        return found

    def called(self, call: SiteCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call that is one opaque node of the graph; its draws come from that node's seed."""
        assert self._nodes is not None, "the calls are among what is known of the nodes"
        name = self._nodes.calls.get((call.site, call.number))
        if name is not None:
            if name not in self._nodes.names[self.drawn : self.drawn + 1]:
                raise Unmatched
            torch.default_generator.manual_seed(seed(*self._step, name))
            self.drawn += 1
        self._within = True
        try:
            return call.run(*args, **kwargs)
        finally:
            self._within = False


@contextmanager
def drawing(
    model: nn.Module, loss: Loss | None, nodes: RandomNodes | None, step: tuple[int, int, int]
) -> Iterator[Drawing]:
    """Within, a model and its loss draw as `Drawing` has it, calls that run as they are too."""
    mode = Drawing(nodes, step)
    sites = dict.fromkeys(site for site, _ in (nodes or RandomNodes()).calls)
    with with_loss(model, loss), standing_in(model, [*sites], mode.called), mode:
        yield mode
