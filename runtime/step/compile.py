"""Compiles the graphs of a stage with torch.compile, island by island.

Some nodes of a graph have to run as Python: random nodes, which seed their generator first; read
checks; gradients given away; what moves to the host and back; in an evaluation, calls of blocks.
The nodes of one block between two of these are an island, and islands are what is compiled:

    forward    [embedding, add]  h.0 [norm, linear, attention]  draw(dropout)  h.0 [add, norm, ...
    backward   ... h.0 [norm, linear, their gradients]  accumulate  accumulate ...
    h.1        the same islands, parameters being their arguments: compiled once for all its class

The graphs are those of `joint.split_backward`, so what is kept for backward is not the compiler's
choice: it is what the plan has counted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopipe.ir.torch_private import writes
from autopipe.joint import offload
from autopipe.joint.graph_writer import step_copy
from autopipe.runtime.step.engine import accumulate
from autopipe.stages.node_calls import python_only, take
from autopipe.stages.op_tape import SEGMENT
from autopipe.stages.precision import low

Island = Callable[..., tuple[Tensor, ...]]

_PYTHON_ONLY = frozenset({accumulate, *python_only, *offload.CALLS})


def compile_stage(module: fx.GraphModule, backend: str = "inductor") -> None:
    """Have the islands of a lowered stage compiled for evaluation, in place, when they first run.

    Sizes are integers in a stage, and so they are in its code (`dynamic=False`).

    Args:
        backend: as `torch.compile` takes it.
    """
    compiler = Compiler(backend)
    for child in list(module.modules()):
        if isinstance(child, fx.GraphModule):
            child.graph = _with_islands(child, compiler)


class Compiler:
    """Compiles the graphs of one stage; equal islands of all of them are compiled once.

    Args:
        backend: as `torch.compile` takes it.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._known: dict[object, Island] = {}

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        """The graph with its islands compiled, when they first run."""
        return fx.GraphModule(module, _with_islands(module, self))

    def island(self, key: object, body: fx.Graph) -> Island:
        """The compiled function of an island."""
        if key not in self._known:
            self._known[key] = self._compiled(body)
        return self._known[key]

    def _compiled(self, body: fx.Graph) -> Island:
        run: Any = torch.compile(
            fx.GraphModule(nn.Module(), body), dynamic=False, backend=self._backend
        )

        def island(*arguments: Tensor) -> tuple[Tensor, ...]:
            results: tuple[Tensor, ...] = run(*arguments)
            return results

        # What the stage's code calls it.
        island.__name__ = island.__qualname__ = f"island_{len(self._known)}"
        return island


def _with_islands(module: fx.GraphModule, compiler: Compiler) -> fx.Graph:
    """A module's graph with each island as one call."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> None:
        env[node] = graph.node_copy(node, env.__getitem__)

    island: list[fx.Node] = []
    given_away: list[fx.Node] = []

    def end() -> None:
        _call(module, graph, island, env, compiler)
        for node in given_away:
            copy(node)
        island.clear()
        given_away.clear()

    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr") or node.target in (low, step_copy):
            copy(node)  # a state, which is an argument of the island and stands before it
            continue
        if island and node.meta.get(SEGMENT) != island[0].meta.get(SEGMENT):
            end()
        if node.target is accumulate and island:
            given_away.append(node)  # with the island: it need not end here
        elif _is_compiled(node):
            island.append(node)
        else:
            end()
            copy(node)
    return graph


def _is_compiled(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target in (take, operator.getitem):  # it goes with what it takes from
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return _is_compiled(source)
    return node.target not in _PYTHON_ONLY


def _writes(node: fx.Node) -> bool:
    """Whether a node may change what stays after its island: a buffer, or a frozen parameter.

    The kernels of batch norms write running statistics although their schemas do not say so.
    """
    called: list[Any] = [a for a in (node.target, *node.args) if hasattr(a, "overloadpacket")]
    return any(writes(op) or "batch_norm" in str(op) for op in called)


def _call(
    module: fx.GraphModule,
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
    if not made and not any(map(_writes, island)):
        return
    body = fx.Graph()
    renamed = {node: body.placeholder(f"given_{n}") for n, node in enumerate(given)}
    for node in island:
        args, kwargs = fx.map_arg((node.args, node.kwargs), renamed.__getitem__)
        renamed[node] = body.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    body.output(tuple(renamed[node] for node in made))
    states = tuple(_state(module, node) for node in given)
    key = body.python_code("self").src, states
    function = compiler.island(key, body)
    call = graph.call_function(function, tuple(env[node] for node in given))
    for number, node in enumerate(made):
        env[node] = graph.call_function(take, (call, number))


def _state(module: fx.GraphModule, node: fx.Node) -> object:
    """What is known of an argument: one body with states of other shapes is another island."""
    while node.target in (low, step_copy):
        node = node.all_input_nodes[0]
    if node.op != "get_attr":
        return None
    *path, name = str(node.target).split(".")
    tensor: Tensor = getattr(module.get_submodule(".".join(path)), name)
    return tuple(tensor.shape), tensor.dtype
