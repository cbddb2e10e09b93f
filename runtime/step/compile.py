"""Compiles the graphs of a stage, island by island.

Some nodes of a graph have to run as Python: random nodes, which seed their generator first; read
checks; gradients given away; what moves to the host and back; ops that no compiler looks into; in
an evaluation, calls of blocks. The nodes of one block between two of these are an island, and
islands are what is compiled (`joint.compiled_graph`):

    forward    [embedding, add]  h.0 [norm, linear, attention]  draw(dropout)  h.0 [add, norm, ...
    backward   ... h.0 [norm, linear, their gradients]  accumulate  accumulate ...
    h.1        the same islands, parameters being their arguments: compiled once for all its class

Between islands there are only tensors: what is taken from a list of them stands where it is made.

The graphs are those of `joint.split_backward`, so what is kept for backward is not the compiler's
choice: it is what the plan has counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import fx, nn

from autopipe.ir.torch_private import views, writes, written_arguments
from autopipe.joint.compiled_graph import Backend, CallSite, CompiledGraph
from autopipe.joint.graph_writer import step_copy
from autopipe.joint.islands import is_compiled, ops_of, takes
from autopipe.runtime.parameters.accumulate import accumulate
from autopipe.stages.node_calls import take
from autopipe.stages.op_tape import SEGMENT
from autopipe.stages.precision import low

_backend: ContextVar[Backend] = ContextVar("backend", default="inductor")


@contextmanager
def compiled_by(backend: Backend) -> Iterator[None]:
    """Within, calls without a backend of their own are compiled by this one of torch.compile."""
    before = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(before)


def compile_stage(module: fx.GraphModule, backend: Backend | None = None) -> None:
    """Have the islands of a lowered stage compiled for evaluation, in place, when they first run.

    Sizes are integers in a stage, and so they are in its code.
    """
    compiler = Compiler(backend)
    for child in list(module.modules()):
        if isinstance(child, fx.GraphModule):
            child.graph = _with_islands(child, compiler)


class Compiler:
    """Compiles the graphs of one stage; equal islands of all of them are compiled once."""

    def __init__(self, backend: Backend | None = None) -> None:
        self._backend = _backend.get() if backend is None else backend
        self._known: dict[str, tuple[str, CompiledGraph]] = {}

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        """The graph with its islands compiled, when they first run."""
        return fx.GraphModule(module, _with_islands(module, self))

    def island(self, body: fx.Graph, *, writes: bool) -> CallSite:
        """The function that calls an island at its place in the code."""
        code = body.python_code("self").src
        if code not in self._known:
            graph = CompiledGraph(fx.GraphModule(nn.Module(), body), self._backend, writes=writes)
            self._known[code] = f"island_{len(self._known)}", graph
        name, graph = self._known[code]
        return graph.at(name)


def _with_islands(module: fx.GraphModule, compiler: Compiler) -> fx.Graph:
    """A module's graph with each island as one call."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> None:
        env[node] = graph.node_copy(node, env.__getitem__)

    island: list[fx.Node] = []
    given_away: list[fx.Node] = []

    def end() -> None:
        _call(graph, island, env, compiler)
        for node in given_away:
            copy(node)
        island.clear()
        given_away.clear()

    for node in _in_order(module.graph.nodes):
        if node.op in ("placeholder", "get_attr") or node.target in (low, step_copy):
            copy(node)  # a state, which is an argument of the island and stands before it
            continue
        if island and node.meta.get(SEGMENT) != island[0].meta.get(SEGMENT):
            end()
        if node.target is accumulate and island:
            given_away.append(node)  # with the island: it need not end here
        elif node.target is not accumulate and is_compiled(node):
            island.append(node)
        else:
            end()
            copy(node)
    return graph


def _in_order(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The nodes, each followed directly by the nodes that take one of its several results."""
    for node in nodes:
        if not takes(node):
            yield from _with_takes(node)


def _with_takes(node: fx.Node) -> Iterator[fx.Node]:
    yield node
    for user in filter(takes, node.users):
        yield from _with_takes(user)


def _writes(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Whether a node may change what its island has not made: a buffer, or an argument.

    The kernels of batch norms write running statistics although their schemas do not say so.
    """
    if any("batch_norm" in str(op) for op in ops_of(node)):
        return True
    if not writes(node.target):  # calls of autopipe's own functions have their arguments elsewhere
        return any(map(writes, ops_of(node)))
    written = written_arguments(node.target, node.args, node.kwargs)
    return any(not isinstance(n, fx.Node) or _base(n) not in inside for n in written)


def _base(node: fx.Node) -> fx.Node:
    """The node of which a node is a view, or may be one."""
    while takes(node) or views(node.target):
        node = node.all_input_nodes[0]
    return node


def _call(
    graph: fx.Graph,
    island: Sequence[fx.Node],
    env: dict[fx.Node, fx.Node],
    compiler: Compiler,
) -> None:
    """Add the call of an island to `graph`, and what it makes to `env`."""
    inside = set(island)
    given = list(
        dict.fromkeys(n for node in island for n in node.all_input_nodes if n not in inside)
    )
    made = [node for node in island if any(user not in inside for user in node.users)]
    changes = any(_writes(node, inside) for node in island)
    if not made and not changes:
        return
    body = fx.Graph()
    renamed = {node: body.placeholder(f"given_{n}") for n, node in enumerate(given)}
    for node in island:
        args, kwargs = fx.map_arg((node.args, node.kwargs), renamed.__getitem__)
        renamed[node] = body.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    body.output(tuple(renamed[node] for node in made))
    function = compiler.island(body, writes=changes)
    call = graph.call_function(function, tuple(env[node] for node in given))
    for number, node in enumerate(made):
        env[node] = graph.call_function(take, (call, number))
