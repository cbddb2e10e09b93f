"""Turn `torch.utils.checkpoint` calls in a user's model into recomputed blocks of the plan.

    checkpoint(block, x, use_reentrant=False)

    traced      autopipe::checkpoint("model.py:31")  block's ops  autopipe::checkpoint("")
    the graph   block's nodes, `again` the user's line
    the plan    a block whose nodes are all marked is a recomputed block

torch.export inlines the function and does not record the checkpoint. Nor does it record that
gradients go off inside of torch.autocast; marks of their own do (`autopipe::grad`). A checkpoint
with `use_reentrant=True` is traced as one without (`opaque.custom_functions`) and noted. The hooks
by which a checkpoint saves tensors are hidden from the trace: an inner checkpoint saves its
arguments through the outer one's hooks, which run under `torch.no_grad()`, and export would leave
gradients off.

A checkpointed function runs again in backward, and then writes its buffers a second time: plain
PyTorch moves the statistics of a batch norm twice. So does the graph, both times in forward:

    norm/batch_norm/0 = batch_norm(x, ..., [norm.running_mean], [norm.running_var], True, ...)
    norm/batch_norm/1 = the same, whose result nothing reads

Backward runs a function again up to the last op that saves something, and all of it for
`use_reentrant=True`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopipe.errors import CaptureError
from autopipe.frontend import user_lines
from autopipe.ir.blocks import Block
from autopipe.ir.dataflow import Dataflow, analyse, gradient_values, obstacle, written_by
from autopipe.ir.graph import REGION_OP, Graph, Node, Ref, State, Value, swap, values_in
from autopipe.ir.torch_patches import seeing_grad_modes, seeing_saved_tensors_hooks
from autopipe.ir.torch_private import no_function_modes
from autopipe.opaque.custom_functions import asked_reentrant
from autopipe.planfile.node_names import NodeName

MARK = "autopipe.checkpoint.default"

GRAD = "autopipe.grad.default"
"""Marks where gradients go on or off inside of torch.autocast."""

_HOME = "torch.utils.checkpoint"


@torch.library.custom_op("autopipe::checkpoint", mutates_args=())
def mark_op(nothing: Tensor, place: str) -> None:
    """Marks in a traced graph where a checkpoint begins (`place`: user's line) or ends ("")."""


@mark_op.register_fake
def _(nothing: Tensor, place: str) -> None:
    return None


@torch.library.custom_op("autopipe::grad", mutates_args=())
def grad_op(nothing: Tensor, mode: str) -> None:
    """Marks in a traced graph that gradients are "on" or "off" in an autocast, or its end ("")."""


@grad_op.register_fake
def _(nothing: Tensor, mode: str) -> None:
    return None


@contextmanager
def marking(reentrant: set[tuple[str, bool]]) -> Iterator[None]:
    """Within, a trace has a mark before and after each checkpointed call, and where gradients go on
    or off inside of torch.autocast.

    `mark_op` is traced where the saved-tensors hooks of a checkpoint are entered and left.

    Args:
        reentrant: receives the line of each checkpoint with `use_reentrant=True`, or around one,
            and whether another is nested with it.
    """
    open_: list[tuple[str, bool]] = []

    def entered(hooks: saved_tensors_hooks) -> None:
        if type(hooks).__module__ == _HOME:
            hooks.pack_hook = _unseen(hooks.pack_hook)
            open_.append((user_lines.here(alone=True), asked_reentrant.get()))
            if any(asked for _, asked in open_):
                reentrant.add((open_[0][0], len(open_) > 1))
            mark_op(torch.empty(0), open_[0][0])

    def left(hooks: saved_tensors_hooks) -> None:
        if type(hooks).__module__ == _HOME:
            open_.pop()
            mark_op(torch.empty(0), open_[0][0] if open_ else "")

    def changed(enabled: bool | None) -> None:
        grad_op(torch.empty(0), "" if enabled is None else "on" if enabled else "off")

    with seeing_saved_tensors_hooks(entered, left), seeing_grad_modes(changed):
        yield


def _unseen(pack: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    def run(tensor: Tensor) -> object:
        with no_function_modes():
            return pack(tensor)

    run.__dict__ = pack.__dict__  # a checkpoint notes the hooks around it there, and removes them
    return run


_SAVES = frozenset(
    (
        "linear",
        "batch_norm",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "layer_norm",
        "conv1d",
        "conv2d",
        "conv3d",
    )
)
"""Ops that surely save something: backward runs a checkpoint again up to the last that does."""


def with_second_writes(
    graph: Graph, assigned: Collection[str], reentrant: Collection[tuple[str, bool]]
) -> Graph:
    """A training graph in which the writes of checkpointed functions are made twice.

    Args:
        assigned: the buffers that modules assign.
        reentrant: what `marking` has noted.

    Raises:
        CaptureError: the second run may write other values; names the line and the buffer.
    """
    if not any(node.again for node in graph.nodes):
        return graph
    flow, nested, carrying = analyse(graph), dict(sorted(reentrant)), gradient_values(graph)
    tracked = {p for p, node in enumerate(graph.nodes) if carrying & {*_results(node)}}
    trained = _trained(graph, tracked)
    buffers = {State(name) for name in assigned}
    copies = [n for n in graph.nodes if n.op == "aten.copy_.default" and n.args[0] in buffers]
    calls: dict[tuple[str, ...], list[int]] = {}
    for run in _checkpoints(graph.nodes, copies):
        if trained.isdisjoint(run):
            continue  # no gradient comes back: nothing runs again
        last = max(tracked.intersection(run))
        _check_assigned(flow, run, copies)
        for position in run:
            node = graph.nodes[position]
            states = [root for v in written_by(node) if isinstance(root := flow.root[v], State)]
            whole = node.again in nested  # else backward stops at the last op that saves
            if node.again and states and (whole or last >= position):
                for state in states:
                    if nested.get(node.again):  # it runs a third time
                        raise _refusal(node, state)
                    _check_second(flow, node, state, run[position - run.start :], whole)
                calls.setdefault(node.scopes, []).append(position)
    after = {positions[-1]: [graph.nodes[p] for p in positions] for positions in calls.values()}
    ordinals = Counter((node.scopes[-1:], node.short) for node in graph.nodes)
    nodes: list[Node] = []
    for position, node in enumerate(graph.nodes):
        nodes += [node, *_once_more(after.get(position, ()), ordinals)]
    return replace(graph, nodes=tuple(nodes))


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
    for run in _checkpoints(graph.nodes, ()):
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


def _checkpoints(nodes: Sequence[Node], copies: Container[Node]) -> Iterator[range]:
    """The positions of each checkpoint's nodes; checkpoints in a row on one line count as one.

    `copies` are copies of assigned buffers, which stand beside their sources.
    """
    first, line = 0, ""
    for position, node in enumerate(nodes):
        if node.again != line and node not in copies:
            if line:
                yield range(first, position)
            first, line = position, node.again
    if line:
        yield range(first, len(nodes))


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


def _check_second(flow: Dataflow, node: Node, state: State, rest: range, whole: bool) -> None:
    """Refuse a write that a checkpoint's second run may do with other values, or not at all.

    Args:
        rest: the positions from the node to the end of its checkpoint.
        whole: whether all of these run again.
    """
    nodes, writers, depth = flow.graph.nodes, flow.writers[state], len(node.scopes)
    alike = {value for value, root in flow.root.items() if root == state}
    read = any(p not in writers and alike & set(n.values()) for p, n in enumerate(nodes))
    calls = {(nodes[p].scopes, nodes[p].again) for p in writers}
    saves = any(nodes[p].short in _SAVES and nodes[p].scopes[:depth] == node.scopes for p in rest)
    if read or len(calls) > 1 or not (whole or saves) or node.op == REGION_OP:
        raise _refusal(node, state)


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


def checkpointed_blocks(
    flow: Dataflow, blocks: Sequence[Block], say: Callable[[str], None]
) -> tuple[str, ...] | None:
    """The paths of the blocks that the model itself checkpoints; None: it has no checkpoint.

    Args:
        say: receives a line for each checkpoint that covers no whole block; it is not recomputed.
    """
    nodes = flow.graph.nodes
    asked = {position: node.again for position, node in enumerate(nodes) if node.again}
    if not asked:
        return None
    again: list[str] = []
    kept: dict[str, str] = {}
    for block in blocks:
        positions = range(block.first, block.stop)
        part = [position for position in positions if position in asked]
        reason = obstacle(flow, positions, block.prefix)
        if len(part) == len(positions) and reason is None:
            again.append(block.path)
        elif part:
            what = "a part of " if len(part) < len(positions) else ""
            because = f", which cannot: {reason}" if reason is not None else ""
            kept.setdefault(asked[part[0]], f"{what}block {block.path!r}{because}")
        for position in part:
            del asked[position]
    for place in dict.fromkeys(asked.values()):
        kept.setdefault(place, "what is no block of the model")
    for place, what in kept.items():
        say(f"{place}: torch.utils.checkpoint asks to run {what} again; its activations are kept")
    if again:
        number = f"{len(again)} block" + "s" * (len(again) > 1)
        say(f"recompute: {number}, as the model asks by torch.utils.checkpoint")
    return tuple(again)
