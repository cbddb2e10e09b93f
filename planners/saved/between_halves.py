"""Count how much more a micro-batch holds between the halves of its backward than before them.

    dx = mm(dy, w)           the first half: frees what no gradient of a weight reads
    dw = mm(dy.t(), x)       the second: until it runs, dy is held beside x

The stages are not known yet, so the whole model's backward is looked at: a call that leads to the
gradient of one parameter alone is of the second half, whichever stage it is in.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopipe.joint.halves import is_of_both
from autopipe.joint.joint_graph import is_of_state, storages
from autopipe.joint.split_backward import Division
from autopipe.stages.op_tape import AGAIN, MADE


def more_between(
    division: Division, of: Mapping[fx.Node, int], kept_by: Mapping[int, int], nodes: int
) -> NDArray[np.int64]:
    """For each node of a graph, the bytes that its backward leaves for the second half, less those
    kept from forward that only the first half reads.

    Args:
        division: of the whole model, its backward in one piece.
        of: for each call of backward the position of the node that it belongs to.
        kept_by: the position of the node by which each storage counts that forward keeps.
        nodes: the number of nodes.
    """
    read = _given_to(_second_half(division), division)
    found = np.zeros(nodes, np.int64)
    for node in division.kept:
        for storage, size in node.meta[MADE].storages.items():
            found[kept_by[storage]] -= 0 if storage in read else size
    for storage, value in read.items():
        if storage not in kept_by and value in of:
            found[of[value]] += value.meta[MADE].storages[storage]
    return found


def _given_to(second: set[fx.Node], division: Division) -> dict[int, fx.Node]:
    """By storage, the values that the second half reads and does not make."""
    found: dict[int, fx.Node] = {}
    readers = [call for call in division.first if call in second or is_of_both(call)]
    pending = [value for call in readers for value in call.all_input_nodes]
    seen = set(second)
    while pending:
        value = pending.pop()
        if value in seen or is_of_state(division.graph, value):
            continue
        seen.add(value)
        if AGAIN in value.meta:  # each half makes its own
            pending += value.all_input_nodes
        else:
            found |= dict.fromkeys(storages([value]), value)
    return found


def _second_half(division: Division) -> set[fx.Node]:
    """The calls of a backward in one piece that lead to the gradient of one parameter alone."""
    targets: dict[fx.Node, set[str]] = {}
    for name, gradient in division.graph.of_parameters.items():
        targets.setdefault(gradient, set()).add(name)
    for call in reversed(division.first):
        leads = set(targets.get(call, ()))
        for user in call.users:
            leads |= targets.get(user, set())
        targets[call] = set(sorted(leads)[:2])
    alone = {c for c in division.first if len(targets[c]) == 1 and AGAIN not in c.meta}
    # A norm's gradients come of one call of the first half, and are taken from its results there.
    parts = {c for c in alone if c.target is operator.getitem and c.args[0] not in alone}
    return alone - parts


def positions(calls: Sequence[fx.Node], key: str, last: int) -> dict[fx.Node, int]:
    """The position of the graph's node that each call of a backward belongs to: of the node whose
    values it reads or, if it reads none, of the call before.

    Args:
        key: the key of positions in a node's meta.
        last: the position of the last node.
    """
    found: dict[fx.Node, int] = {}
    before = last
    for call in calls:
        read = [n.meta[key] for n in (call, *call.all_input_nodes) if key in n.meta]
        before = found[call] = max(read, default=before)
    return found
