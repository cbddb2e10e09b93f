"""Find a graph's aliases, its writes in place, and the nodes that any stage can recompute.

Ops in place stay in place, so a cut must respect aliases:

    x = linear(...)            x and y are one storage
    y = view(x)                relu_ writes it through x
    relu_(x)                   a cut here would send x and y as two tensors: not allowed
    z = add(x, y)

Values that need no parameter, no random number and no activation (masks, position ids, rotary
tables) are cheaper to recompute in a later stage than to send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopipe.ir.graph import (
    READ_OP,
    REGION_OP,
    Arg,
    Graph,
    Input,
    Node,
    Ref,
    State,
    Value,
    arguments,
    once,
    resolve,
    values_in,
)
from autopipe.ir.opaque_ops import FUNCTION_OP, OPAQUE
from autopipe.ir.torch_private import formal_arguments, views, writes, written_arguments


@dataclass(frozen=True)
class Dataflow:
    """Aliases, writes and readers of a graph's values, by node position.

    Attributes:
        root: for each value, the value that owns its storage.
        writers: for each root, the positions of the nodes that write it, ascending.
        before: for each node, the positions of writers that it must follow without reading them.
        local: for each node, whether any stage can recompute it from the batch.
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
        """The position of the node that makes a value; -1 for the batch's leaves and the states."""
        return self.graph.index[value.node] if isinstance(value, Ref) else -1

    def just_before(self, position: int) -> list[int]:
        """The positions of the nodes that one reads, and of the writers that it must follow."""
        read = self.graph.nodes[position].values()
        return [*(self.position(v) for v in read if isinstance(v, Ref)), *self.before[position]]

    def with_all_before(self, positions: Iterable[int]) -> set[int]:
        """These positions, and those of all nodes that must have run before their nodes."""
        found, waiting = set[int](), [*positions]
        while waiting:
            position = waiting.pop()
            if position not in found:
                found.add(position)
                waiting += self.just_before(position)
        return found


def maker(graph: Graph, value: object) -> Node | None:
    """The node that makes a value; None: it is an input, a state, or no value."""
    return graph.nodes[graph.index[value.node]] if isinstance(value, Ref) else None


def read_once(flow: Dataflow, value: object) -> Node | None:
    """The node that makes a value, if one node reads it and none writes it."""
    if not isinstance(value, Ref) or len(flow.users[value]) > 1:
        return None
    return None if flow.root[value] in flow.writers else maker(flow.graph, value)


@once
def analyse(graph: Graph) -> Dataflow:
    """Find the aliases, writes, readers and local nodes of a graph."""
    root: dict[Value, Value] = {}
    writers: dict[Value, list[int]] = defaultdict(list)
    before: list[tuple[int, ...]] = []
    users: dict[Value, list[int]] = defaultdict(list)
    for position, node in enumerate(graph.nodes):
        read = dict.fromkeys(node.values())
        for value in read:
            root.setdefault(value, value)
            users[value].append(position)
        op, written = resolve(node.op), written_by(node)
        shared = written if written and views(op) else _shared(graph, node, op)
        for number in range(len(node.outputs)):
            result = Ref(node.name, number)
            root[result] = root[shared[min(number, len(shared) - 1)]] if shared else result
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
    "dropout feature_dropout alpha_dropout feature_alpha_dropout type_as conj_physical to_dense "
    "atleast_1d atleast_2d atleast_3d broadcast_tensors meshgrid sum_to_size unsafe_chunk "
    "unsafe_split unsafe_split_with_sizes unflatten_dense_tensors".split()
)
_UNDECLARED_OF_ONE = frozenset("einsum cartesian_prod flatten_dense_tensors".split())
"""Ops that sometimes return an argument or a view of it, although their schemas do not say so: a
dropout with probability 0 its input, an einsum of one operand that one with its dims moved."""


def _shared(graph: Graph, node: Node, op: object) -> list[Value]:
    """The values whose memory the results may share: one each or one for all; a cast has none."""
    values = list(node.values())
    cast = node.short in ("to", "type_as") and graph.spec(values[0]) != node.outputs[0]
    undeclared = node.short in _UNDECLARED and not is_random(node)
    alone = node.short in _UNDECLARED_OF_ONE and len(values) == 1
    if cast or not (views(op) or undeclared or alone):
        return []
    of_each = isinstance(node.args[0], tuple) and len(node.args[0]) == len(node.outputs)
    return values[: len(node.outputs) if of_each else 1]


def statistics_written(op: object, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> list[Arg]:
    """The running statistics that one call of a norm writes, of which its schema says nothing."""
    if "running_mean" not in (names := formal_arguments(op)) or writes(op):
        return []
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    trains = given.get("training") or given.get("use_input_stats")
    return [given.get("running_mean"), given.get("running_var")] if trains else []


def written_by(node: Node) -> list[Value]:
    """The values that a node writes in place, running statistics among them."""
    names = written_arguments(resolve(node.op), node.args, node.kwargs)
    return [*values_in(tuple(names)), *written_statistics(node)]


def written_statistics(node: Node) -> list[Value]:
    """The running statistics that a node writes, and does not compute with."""
    return [*values_in(tuple(statistics_written(resolve(node.op), node.args, node.kwargs)))]


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    short = node.short
    if node.op in (REGION_OP, FUNCTION_OP):
        return bool(arguments(node)["random"])
    if "dropout" in short and {"p", "train"} <= (given := arguments(node)).keys():
        return bool(given["train"]) and given["p"] != 0
    if short == "scaled_dot_product_attention":
        return bool(arguments(node)["dropout_p"] != 0.0)
    if short in ("lstm", "gru", "rnn_tanh", "rnn_relu", "packed_rnn"):
        given = arguments(node)
        return bool(given["train"]) and given["dropout"] != 0
    tags = getattr(resolve(node.op), "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or short in ("rrelu", "rrelu_")


def _local(
    graph: Graph,
    root: Mapping[Value, Value],
    writers: Mapping[Value, tuple[int, ...]],
    before: list[tuple[int, ...]],
) -> tuple[bool, ...]:
    """For each node, whether it depends only on the batch, constants and unwritten buffers."""
    bound: set[Value] = {r for r in writers if isinstance(r, Input | State)}
    local = [False] * len(graph.nodes)
    while True:  # a group of aliases is local as a whole or not at all
        for position, node in enumerate(graph.nodes):
            values = node.values()
            local[position] = (
                all(_is_local(graph, v, local) for v in values)  # first: of most nodes it is not so
                and all(local[p] for p in before[position])
                and node.op not in (READ_OP, REGION_OP)
                and not is_random(node)
                and not any(root[v] in bound for v in values)
                and not any(root[Ref(node.name, n)] in bound for n in range(len(node.outputs)))
            )
        made = [value for value in writers if isinstance(value, Ref)]
        found = {value for value in made if not all(local[p] for p in writers[value])}
        if found <= bound:
            return tuple(local)
        bound |= found


def _is_local(graph: Graph, value: Value, local: list[bool]) -> bool:
    if isinstance(value, Ref):
        return local[graph.index[value.node]]
    return isinstance(value, Input) or graph.states[value.name].kind != "parameter"


@once
def gradient_values(graph: Graph) -> frozenset[Ref | State]:
    """The values through which a gradient flows back to a trainable parameter.

    A tensor that is written with such a value is one from then on, and with it all its views:

        a = zeros(2, 16)
        v = a[0]
        v.copy_(h)          h carries a gradient; now v does, and a too
    """
    flow = analyse(graph)
    carrying: set[Ref | State] = {State(n) for n, s in graph.states.items() if s.trainable}
    views_of: dict[Value, list[Ref]] = defaultdict(list)
    for node in graph.nodes:
        if not node.grad or node.op in (READ_OP, "aten.detach.default"):
            continue
        results = [
            Ref(node.name, number)
            for number, spec in enumerate(node.outputs)
            if spec is not None and (spec.dtype.is_floating_point or spec.dtype.is_complex)
        ]
        if any(value in carrying for value in node.values()):
            carrying.update(results)
            written = written_arguments(resolve(node.op), node.args, node.kwargs)
            for value in values_in(tuple(written)):
                carrying.update(views_of[flow.root[value]])
        for value in results:
            if flow.root[value] in flow.writers:
                views_of[flow.root[value]].append(value)
    return frozenset(carrying)


def written_parameters(graph: Graph) -> Mapping[str, Node]:
    """The frozen parameters that forward writes, each with the first node that writes it.

    A teacher's parameters that follow a student's are such. A trace refuses to write trained ones.
    """
    return {
        name: node
        for name, node in written_states(graph).items()
        if graph.states[name].kind == "parameter"
    }


def written_states(graph: Graph) -> Mapping[str, Node]:
    """The states that forward writes, each with the first node that does."""
    return {
        root.name: graph.nodes[positions[0]]
        for root, positions in analyse(graph).writers.items()
        if isinstance(root, State)
    }


@once
def rewritten_reads(graph: Graph) -> Mapping[str, frozenset[Value]]:
    """The values of written states that each node with a gradient reads, by the node's name.

        tau.copy_(...)          a buffer; or a frozen parameter that follows another
        y = x / tau             backward reads tau, when a later micro-batch may have written it

    What a node writes itself is not among them: the running statistics of a batch norm.
    """
    flow, carrying = analyse(graph), gradient_values(graph)
    written = {root for root in flow.writers if isinstance(root, State)}
    found: dict[str, frozenset[Value]] = {}
    for position, node in enumerate(graph.nodes) if written else ():
        if views(resolve(node.op)) or not any(
            Ref(node.name, number) in carrying for number in range(len(node.outputs))
        ):
            continue
        writes = {flow.root[value] for value in written_by(node)}
        read = frozenset(
            value
            for value in node.values()
            if (root := flow.root[value]) in written - writes and flow.writers[root][0] < position
        )
        if read:
            found[node.name] = read
    return found


def statistics(flow: Dataflow, positions: Sequence[int], home: str) -> frozenset[State]:
    """The states that the nodes at `positions` write and whose values reach no result of theirs.

    The running statistics of batch norms in training, and the counts of their calls. A second run
    may write copies of them.

    Args:
        home: what the names of the states begin with, in whose module the nodes stand.
    """
    inside = set(positions)
    reached: set[State] = set()
    for root, writers in flow.writers.items():
        if not isinstance(root, State) or not root.name.startswith(home) or {*writers} - inside:
            continue
        readers = {p for v, users in flow.users.items() if flow.root[v] == root for p in users}
        if all(only_writes(flow, p, root) for p in readers & inside):
            reached.add(root)
    return frozenset(reached)


def only_writes(flow: Dataflow, position: int, state: State) -> bool:
    """Whether what a node makes of a state is in the state's memory, or is statistics."""
    node = flow.graph.nodes[position]
    if any(flow.root[value] == state for value in written_statistics(node)):
        given = arguments(node)
        computed = values_in((given["input"], given["weight"], given["bias"]))
        return all(flow.root[value] != state for value in computed)
    results = [Ref(node.name, n) for n, spec in enumerate(node.outputs) if spec is not None]
    return bool(results) and all(flow.root[value] == state for value in results)


def obstacle(flow: Dataflow, positions: Sequence[int], home: str | None = None) -> str | None:
    """Why the nodes at `positions` cannot be recomputed with equal results; None: they can.

    Args:
        home: as for `statistics`, of which the second run writes copies; None: it would write them.
    """
    inside = {flow.graph.nodes[position].name for position in positions}
    copied = statistics(flow, positions, home) if home is not None else frozenset()
    for position in positions:
        node = flow.graph.nodes[position]
        if node.op == REGION_OP:
            return f"{node.name} runs as it is, and may do otherwise the second time"
        if node.op in OPAQUE:
            return f"{node.name} ({node.op}) reads or keeps what only its kernel knows"
        for value in node.values():
            root = flow.root[value]
            if isinstance(root, Ref) and root.node in inside or root in copied:
                continue
            for writer in flow.writers.get(root, ()):
                # A state that is written anywhere has other values after the next micro-batch.
                if writer >= positions[0] or isinstance(root, State):
                    return f"{node.name} reads {root}, which {flow.graph.nodes[writer].name} writes"
    return None
