"""Who shares memory with whom in a graph, who writes it, and what can be made again anywhere.

Ops in place stay in place, so a cut must mind aliases:

    x = linear(...)            x and y are one storage
    y = view(x)                relu_ writes it through x
    relu_(x)                   a cut here would send x and y as two tensors: not allowed
    z = add(x, y)

Values that need no parameter, no random number and no activation (masks, position ids, rotary
tables) are cheaper to make again on the far side of a cut than to send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopipe.fake import views, writes
from autopipe.graph import READ_OP, Graph, Input, Node, Ref, State, Value, once, resolve, values_in


@dataclass(frozen=True)
class Dataflow:
    """What a partition needs to know of a graph's nodes, by position.

    Attributes:
        root: the value whose storage a value lies in.
        writers: for each root, the positions of the nodes that write it, ascending.
        before: for each node, the writers it must come after without reading their result.
        local: whether the node can be made again in any stage.
        users: for each value, the positions of the nodes that read it, ascending; the graph's
            results are read at the position after the last node.
    """

    graph: Graph
    root: Mapping[Value, Value]
    writers: Mapping[Value, tuple[int, ...]]
    before: tuple[tuple[int, ...], ...]
    local: tuple[bool, ...]
    users: Mapping[Value, tuple[int, ...]]

    def position(self, value: Value) -> int:
        """Where a value is made; -1 for the batch's leaves and the model's states."""
        return self.graph.index[value.node] if isinstance(value, Ref) else -1


@once
def analyse(graph: Graph) -> Dataflow:
    """Find aliases, writes and what can be made again."""
    root: dict[Value, Value] = {}
    writers: dict[Value, list[int]] = defaultdict(list)
    before: list[tuple[int, ...]] = []
    users: dict[Value, list[int]] = defaultdict(list)
    for position, node in enumerate(graph.nodes):
        read = dict.fromkeys(node.values())
        for value in read:
            root.setdefault(value, value)
            users[value].append(position)
        op = resolve(node.op)
        written = _written(node, op)
        shared = written if written and views(op) else _shared(node, op)
        for number in range(len(node.outputs)):
            made = Ref(node.name, number)
            root[made] = root[shared[min(number, len(shared) - 1)]] if shared else made
        before.append(tuple({p for v in read for p in writers[root[v]]}))
        for value in written:
            writers[root[value]].append(position)
    for value in dict.fromkeys(values_in(graph.outputs)):
        root.setdefault(value, value)
        users[value].append(len(graph.nodes))
    frozen_writers = {r: tuple(p) for r, p in writers.items() if p}
    local = _local(graph, root, frozen_writers, before)
    return Dataflow(
        graph, root, frozen_writers, tuple(before), local, {v: tuple(p) for v, p in users.items()}
    )


_UNDECLARED = frozenset(
    "dropout feature_dropout alpha_dropout feature_alpha_dropout type_as atleast_1d atleast_2d "
    "atleast_3d broadcast_tensors meshgrid einsum sum_to_size unsafe_chunk unsafe_split".split()
)
"""Ops that give back an argument or a view of it in some cases, though their schemas do not say.

A dropout of nothing is one of them: it returns its input.
"""


def _shared(node: Node, op: object) -> list[Value]:
    """The values whose memory the results may lie in: one for each result, or one for all."""
    undeclared = node.op.split(".")[1] in _UNDECLARED and not is_random(node)
    if not undeclared and not views(op):
        return []
    of_each = isinstance(node.args[0], tuple) and len(node.args[0]) == len(node.outputs)
    return list(values_in(node.args))[: len(node.outputs) if of_each else 1]


def _written(node: Node, op: object) -> list[Value]:
    names = [node.args[i] for i in writes(op) if i < len(node.args)]
    if node.op.startswith("aten.batch_norm") and node.args[5]:
        names += node.args[3:5]  # the running statistics; the schema does not say it writes them
    elif node.op.startswith("aten.instance_norm") and node.args[5]:
        names += node.args[3:5]
    return [value for value in values_in(tuple(names))]


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    short = node.op.split(".")[1]
    if "dropout" in short:
        return bool(node.args[2]) and node.args[1] != 0  # (input, p, train)
    if short == "scaled_dot_product_attention":
        p = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return p != 0.0
    if short in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        # (input, hx, params, has_biases, num_layers, dropout, train, ...)
        return bool(node.args[6]) and node.args[5] != 0
    tags = getattr(resolve(node.op), "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or short in ("rrelu", "rrelu_")


def _local(
    graph: Graph,
    root: Mapping[Value, Value],
    writers: Mapping[Value, tuple[int, ...]],
    before: list[tuple[int, ...]],
) -> tuple[bool, ...]:
    """The nodes that depend on nothing but the batch, constants and buffers nobody writes."""
    bound: set[Value] = {r for r in writers if isinstance(r, Input | State)}
    local = [False] * len(graph.nodes)
    while True:  # a group of aliases is local as a whole or not at all
        for position, node in enumerate(graph.nodes):
            values = node.values()
            local[position] = (
                all(_is_local(graph, v, local) for v in values)  # first: of most nodes it is not so
                and all(local[p] for p in before[position])
                and node.op != READ_OP
                and not is_random(node)
                and not any(root[v] in bound for v in values)
                and not any(root[Ref(node.name, n)] in bound for n in range(len(node.outputs)))
            )
        found = {
            r
            for r, positions in writers.items()
            if isinstance(r, Ref) and not all(local[p] for p in positions)
        }
        if found <= bound:
            return tuple(local)
        bound |= found


def _is_local(graph: Graph, value: Value, local: list[bool]) -> bool:
    if isinstance(value, Ref):
        return local[graph.index[value.node]]
    return isinstance(value, Input) or graph.states[value.name].kind != "parameter"
