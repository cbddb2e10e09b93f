"""Write twice, in a training graph, what functions under `torch.utils.checkpoint` write.

A checkpointed function runs again in backward, and then writes its buffers a second time: plain
PyTorch moves the statistics of a batch norm twice. So does the graph, both times in forward:

    norm/batch_norm/0 = batch_norm(x, ..., [norm.running_mean], [norm.running_var], True, ...)
    norm/batch_norm/1 = the same, whose result nothing reads

How far a function runs again is said by its `CheckpointCall`. What a checkpoint within another one
writes is refused: plain PyTorch runs some of these three times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from autopipe.errors import CaptureError
from autopipe.ir.dataflow import Dataflow, analyse, gradient_values, written_by
from autopipe.ir.graph import REGION_OP, Graph, Node, Ref, State, Value, swap, values_in
from autopipe.planfile.node_names import NodeName
from autopipe.rewriting.checkpoint_calls import CheckpointCall, nodes_of_calls

SAVING = {
    "linear": (0, 1),
    "addmm": (1, 2),
    **dict.fromkeys("matmul mm bmm conv1d conv2d conv3d batch_norm layer_norm group_norm".split()),
    **dict.fromkeys("relu relu_ gelu silu tanh sigmoid exp softmax log_softmax embedding".split()),
    "scaled_dot_product_attention": None,
}
"""Ops that surely save something if autograd tracks them -> the arguments of which one must be
tracked; None: any."""

KEEPING_NOTHING = frozenset(
    "add add_ sub sub_ rsub neg sum mean cat stack clone contiguous view reshape flatten unflatten "
    "transpose permute unsqueeze squeeze expand select slice chunk split unbind to".split()
)
"""Ops that save nothing. Those in neither table may or may not."""


def with_second_writes(graph: Graph, assigned: Collection[str]) -> Graph:
    """A training graph in which the writes of checkpointed functions are made twice, and whose
    nodes have the lines of their checkpoints alone.

    Args:
        assigned: the buffers that modules assign.

    Raises:
        CaptureError: the second run may write other values; names the line and the buffer.
    """
    if not any(node.again for node in graph.nodes):
        return graph
    flow, buffers = analyse(graph), {State(name) for name in assigned}
    copies = [n for n in graph.nodes if n.op == "aten.copy_.default" and n.args[0] in buffers]
    runs = _Runs.of(flow)
    calls: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for run in nodes_of_calls(graph.nodes, copies):
        if not runs.trained.isdisjoint(run):  # else no gradient comes back: nothing runs again
            _check_assigned(flow, run, copies)
            for position in runs.written_again(run):
                node = graph.nodes[position]
                calls.setdefault((node.again, node.scopes), []).append(position)
    after = {positions[-1]: [graph.nodes[p] for p in positions] for positions in calls.values()}
    ordinals = Counter((node.scopes[-1:], node.short) for node in graph.nodes)
    nodes: list[Node] = []
    for position, node in enumerate(graph.nodes):
        nodes += [node, *_once_more(after.get(position, ()), ordinals)]
    lines = (replace(n, again=CheckpointCall.of(n.again).line) if n.again else n for n in nodes)
    return replace(graph, nodes=tuple(lines))


@dataclass(frozen=True)
class _Runs:
    """What backward runs again of a graph, by the positions of nodes.

    Attributes:
        trained: what autograd tracks and a gradient of the loss goes through.
        saving: of what autograd tracks, what surely saves something.
        perhaps: of that, what may save something.
    """

    flow: Dataflow
    trained: frozenset[int]
    saving: frozenset[int]
    perhaps: frozenset[int]

    @classmethod
    def of(cls, flow: Dataflow) -> _Runs:
        """Find what backward runs again of a graph."""
        nodes, carrying = flow.graph.nodes, gradient_values(flow.graph)
        tracked = frozenset(p for p, node in enumerate(nodes) if carrying & {*_results(node)})
        saving = frozenset(p for p in tracked if _saves(nodes[p], carrying))
        perhaps = frozenset(p for p in tracked if nodes[p].short not in KEEPING_NOTHING)
        return cls(flow, frozenset(_trained(flow.graph, tracked)), saving, perhaps)

    def written_again(self, run: range) -> Iterator[int]:
        """The nodes of a call that write a buffer a second time in backward.

        Raises:
            CaptureError: whether one does, or what it writes, is not known.
        """
        nodes, root = self.flow.graph.nodes, self.flow.root
        last = max(self.perhaps.intersection(run), default=-1)
        for position in run:
            node = nodes[position]
            states = [found for v in written_by(node) if isinstance(found := root[v], State)]
            if not states or not node.again:
                continue
            call = CheckpointCall.of(node.again)
            if call.until == "last saved" and position > last and not call.nested:
                continue
            if call.until in ("last saved", "end if saved") and self._reads_nothing(run):
                continue
            for state in states:
                if not self._surely(run, position, call) or not self._writes_alike(node, state):
                    raise _refusal(node, state)
            yield position

    def _reads_nothing(self, run: range) -> bool:
        """Whether backward surely reads nothing of what the ops of a call save."""
        return self.perhaps.isdisjoint(self.trained.intersection(run))

    def _surely(self, run: range, position: int, call: CheckpointCall) -> bool:
        """Whether a node of a call, through which a gradient goes, surely runs twice."""
        if call.nested or call.until == "otherwise":
            return False
        if call.until == "end":
            return True
        if self.saving.isdisjoint(self.trained.intersection(run)):
            return False  # it may be that backward reads nothing of what its ops save
        own = (p for p in self.saving.intersection(run) if not self._nested(p))
        return call.until == "end if saved" or max(own, default=-1) >= position

    def _nested(self, position: int) -> bool:
        return CheckpointCall.of(self.flow.graph.nodes[position].again).nested

    def _writes_alike(self, node: Node, state: State) -> bool:
        """Whether a node writes, the second time, what it would write behind its first time."""
        nodes, writers = self.flow.graph.nodes, self.flow.writers[state]
        alike = {value for value, root in self.flow.root.items() if root == state}
        read = any(p not in writers and alike & set(n.values()) for p, n in enumerate(nodes))
        calls = {(nodes[p].scopes, nodes[p].again) for p in writers}
        return not read and len(calls) == 1 and node.op != REGION_OP


def _saves(node: Node, carrying: Container[Value]) -> bool:
    """Whether autograd, which tracks a node, surely keeps something for its backward."""
    if node.short not in SAVING:
        return False
    which = SAVING[node.short]
    return which is None or any(node.args[n] in carrying for n in which)


def with_own_results(graph: Graph) -> Graph:
    """A graph in which later code writes in a copy of what a checkpointed function gives.

        x = checkpoint(block, x)        block ends in a tanh, which keeps its result for backward
        x += skip                       written: backward would fail

    Backward of a checkpoint runs the function again, and reads another result.
    """
    if not any(node.again for node in graph.nodes):
        return graph
    flow, copies = analyse(graph), dict[int, list[Node]]()
    ordinals = Counter((node.scopes[-1:], node.short) for node in graph.nodes)
    for run in nodes_of_calls(graph.nodes, ()):
        for result in _written_after(flow, run):
            copies.setdefault(run.stop, []).append(_copy(flow, result, ordinals))
    if not copies:
        return graph
    nodes: list[Node] = []
    copied: dict[Value, Value] = {}
    for position, node in enumerate(graph.nodes):
        for copy in copies.get(position, ()):
            nodes.append(copy)
            copied |= {value: Ref(copy.name) for value in copy.values()}
        nodes.append(node.reading(copied))
    return replace(graph, nodes=tuple(nodes), outputs=swap(graph.outputs, copied))


def _written_after(flow: Dataflow, run: range) -> Iterator[Ref]:
    """The tensors that a checkpoint's nodes make and later ones write, not through another alias.

    Args:
        run: the positions of the checkpoint's nodes.
    """
    for position in run:
        node = flow.graph.nodes[position]
        for value in _results(node):
            if max(flow.writers.get(value, ()), default=0) >= run.stop:
                aliases = [v for v, root in flow.root.items() if root == value != v]
                made_here = [v for v in aliases if flow.position(v) in run]
                if not any(user >= run.stop for v in made_here for user in flow.users[v]):
                    yield value


def _copy(flow: Dataflow, result: Ref, ordinals: Counter[tuple[tuple[str, ...], str]]) -> Node:
    """A copy of a checkpoint's result, made by the innermost module that also writes in it."""
    nodes = flow.graph.nodes
    maker, writer = nodes[flow.position(result)], nodes[flow.writers[result][-1]]
    pairs = zip(maker.scopes, writer.scopes, strict=False)
    scopes = tuple(path for path, other in takewhile(lambda pair: pair[0] == pair[1], pairs))
    kind = scopes[-1:], "clone"
    name = str(NodeName("".join(scopes[-1:]), "clone", ordinals[kind]))
    ordinals[kind] += 1
    spec, op = flow.graph.spec(result), "aten.clone.default"
    return Node(name, op, (result,), {}, (spec,), False, scopes, writer.place)


def _once_more(
    nodes: Sequence[Node], ordinals: Counter[tuple[tuple[str, ...], str]]
) -> Iterator[Node]:
    """Copies, under new names, of nodes that write."""
    values: dict[Value, Value] = {}
    for node in nodes:
        kind = node.scopes[-1:], node.short
        name = str(NodeName("".join(node.scopes[-1:]), node.short, ordinals[kind]))
        ordinals[kind] += 1
        yield replace(node.reading(values), name=name, grad=False)
        values |= {Ref(node.name, n): Ref(name, n) for n in range(len(node.outputs))}


def _trained(graph: Graph, tracked: Collection[int]) -> set[int]:
    """The positions of the nodes, of those that autograd tracks, through which a gradient of the
    loss goes."""
    needed, found = set(values_in(graph.outputs[:1])), set[int]()
    for position in sorted(tracked, reverse=True):
        node = graph.nodes[position]
        if needed & {*_results(node)}:
            found.add(position)
            needed |= set(node.values())
    return found


def _results(node: Node) -> Iterator[Ref]:
    return (Ref(node.name, number) for number in range(len(node.outputs)))


def _check_assigned(flow: Dataflow, run: range, copies: Collection[Node]) -> None:
    """Refuse a buffer that is assigned in a checkpoint: it is written at the end of its module."""
    for node in copies:
        source = node.args[1]
        if isinstance(source, Ref) and flow.position(source) in run:
            if len(flow.users[source]) == 1:  # else it is what the function gives
                raise _refusal(node, node.args[0])


def _refusal(node: Node, state: object) -> CaptureError:
    return CaptureError(
        f"{node.place}: {state} is written in a function that torch.utils.checkpoint runs again in "
        "backward; what the second run makes of it is not in a graph",
        hint="write it outside of that function, or leave the checkpoint out: autopipe chooses "
        "what runs again",
    )
