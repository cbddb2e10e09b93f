"""Noise: a tensor that is made and filled by a draw in place before anything reads it.

    empty_like ── bernoulli_ ── div_ ──┬── mul           dropout on a CPU; one op on a GPU
                                       └── backward

A tensor that is written in place is another one later, so that what reads it cannot run again.
Noise is written by its own chain of calls alone: they run again together, and with them what reads
them, as the one op does that they are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from autopipe.ir.torch_private import writes
from autopipe.joint.joint_graph import called, storages, written

Chains = Mapping[fx.Node, tuple[fx.Node, ...]]
"""Of each call of a chain all of them, in their order."""


def chains(calls: Iterable[fx.Node]) -> Chains:
    """The chains that make noise.

    Args:
        calls: a joint graph's, forward and backward, in their order.
    """
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    besides: set[int] = set()
    for call in calls:
        before = _filled(call)
        if before is not None and len(before.users) == 1 and (before in found or _is_new(before)):
            chain = (*found.get(before, (before,)), call)
            found |= dict.fromkeys(chain, chain)
        else:
            besides |= written(call)
    return {
        call: chain
        for call, chain in found.items()
        if any(map(_draws, chain)) and besides.isdisjoint(storages([call]))
    }


def _draws(call: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(called(call)[0], "tags", ())


def _filled(call: fx.Node) -> fx.Node | None:
    """The value that a call writes in place and returns; None: it does something else."""
    op, args = called(call)
    read: Any = args[0] if args else None
    if writes(op) != (0,) or not isinstance(read, fx.Node):
        return None
    return read if storages([call]) == storages([read]) else None


def _is_new(node: fx.Node) -> bool:
    """Whether a call has made a value in memory of its own."""
    return node.op == "call_function" and storages([node]).isdisjoint(
        storages(node.all_input_nodes)
    )
