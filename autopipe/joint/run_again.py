"""Choose what a stage keeps for its backward: which ops run again, so that less is kept.

    x ──norm──> n ──mm──> ...        backward reads n (for the weight of mm) and x (for norm)
                                     kept: x;  runs again: norm

In a compiled stage, ops that only move memory (pointwise ops, norms, softmax, copies) may run
again; matrix products, attention, random draws and collectives only if a plan asks for it
(`ASKED`); ops on tensors that are written in place never, unless the tensor is noise. The tensors
to keep are found by a minimum cut (`joint.least_cut`, which defines noise).

A block's ops run again from tensors of that block only: no chain of residual sums leads back
through the whole stage, and results of such ops live for one block at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from autopipe.joint.joint_graph import JointGraph, storages, written
from autopipe.joint.least_cut import FREE, Cut, Network, Price, chains, maker
from autopipe.stages.op_tape import AGAIN, ASKED, MADE, SEGMENT

CHEAP = frozenset(
    "native_layer_norm native_group_norm _fused_rms_norm _softmax _log_softmax _safe_softmax "
    "_to_copy cat stack tril triu constant_pad_nd mean sum amax amin var var_mean "
    "full full_like zeros zeros_like ones ones_like arange scalar_tensor gather".split()
)
"""Ops of aten, beside those that torch tags as pointwise, whose time is that of moving memory."""


def chosen(graph: JointGraph, needed: Iterable[fx.Node], *, least: bool) -> list[fx.Node]:
    """The calls of forward that are to run again in backward, in their order.

    Args:
        needed: the values of forward that backward reads.
        least: whether cheap calls may run again without being asked for.
    """

    def may(call: fx.Node) -> Price:
        return FREE if ASKED in call.meta or (least and is_cheap(call)) else None

    again = {node for _, _, cut in networks(graph, needed, may) for node in cut.again}
    return [node for node in graph.forward if node in again]


def networks(
    graph: JointGraph, needed: Iterable[fx.Node], price: Callable[[fx.Node], Price]
) -> Iterator[tuple[str | None, Network, Cut]]:
    """Each block's path and network, the latest block first, with its cut at which no call that has
    a price runs again.

    What a later block keeps costs an earlier one nothing.

    Args:
        needed: the values of forward that backward reads.
        price: as `Network` has it.
    """
    needed_values = set(needed)
    segments: dict[str | None, list[fx.Node]] = {}
    for node in reversed(graph.forward):
        segments.setdefault(node.meta[SEGMENT], []).append(node)
    every = (*graph.forward, *graph.backward)
    noise = chains(every)
    blocked = frozenset(s for call in every if call not in noise for s in written(call))

    def with_noise(call: fx.Node) -> Price:
        chain = next((noise[read] for read in call.all_input_nodes if read in noise), (call,))
        return price(chain[0])

    kept_storages = storages([*graph.states, *graph.arguments])
    for segment, calls in segments.items():
        if not needed_values.isdisjoint(calls):
            network = Network(
                graph, blocked, noise, kept_storages, calls[::-1], needed_values, with_noise
            )
            cut = network.least({})
            yield segment, network, cut
            kept_storages = kept_storages | storages(cut.keeps)


def is_cheap(call: fx.Node) -> bool:
    """Whether a call's time is that of moving memory."""
    op: Any = call.target
    if getattr(op, "namespace", None) != "aten":
        return False
    return op.overloadpacket.__name__ in CHEAP or torch.Tag.pointwise in op.tags


def run_again(
    calls: Sequence[fx.Node],
    outputs: Iterable[fx.Node | None],
    again: Sequence[fx.Node],
    keys: Iterator[int],
) -> list[fx.Node]:
    """Calls of a backward, with copies of calls of `again` before the first one that reads them.

    Args:
        outputs: what the backward returns; these are no copies.
        again: in the order of forward.
        keys: of storages, that no other storage has.
    """
    fixed = frozenset(outputs)
    position = {node: number for number, node in enumerate(again) if node not in fixed}
    copies: dict[fx.Node, fx.Node] = {}
    renamed: dict[int, int] = defaultdict(partial(next, keys))
    result: list[fx.Node] = []
    for call in calls:
        for node in sorted(_leading_to(call, position, copies), key=position.__getitem__):
            inputs = storages(copies.get(value, value) for value in node.all_input_nodes)
            with node.graph.inserting_before(call):
                twin = node.graph.node_copy(node, lambda value: copies.get(value, value))
            source = maker(twin)
            after_copy = source is not twin and AGAIN in source.meta
            segment = source.meta[SEGMENT] if after_copy else call.meta[SEGMENT]
            twin.meta |= {MADE: node.meta[MADE].again(renamed, inputs), SEGMENT: segment}
            twin.meta[AGAIN] = True
            copies[node] = twin
            # A result that a later block reads is unpacked where it is made, like all others.
            result.insert(result.index(source) + 1 if after_copy else len(result), twin)
        for value in call.all_input_nodes:
            if value in copies:
                call.replace_input_with(value, copies[value])
        made = call.meta[MADE].storages
        if not made.keys().isdisjoint(renamed):  # a view of what has run again
            call.meta[MADE] = call.meta[MADE].again(renamed, made.keys() - renamed.keys())
        result.append(call)
    return result


def _leading_to(
    call: fx.Node, again: Collection[fx.Node], besides: Collection[fx.Node]
) -> set[fx.Node]:
    """The nodes of `again` that a call needs, directly or through others of them."""
    found: set[fx.Node] = set()
    pending = list(call.all_input_nodes)
    while pending:
        node = pending.pop()
        if node in again and node not in found and node not in besides:
            found.add(node)
            pending += node.all_input_nodes
    return found
