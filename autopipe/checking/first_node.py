"""Name the node of the graph where a difference begins.

    a loss          in the order of forward: the first node whose result plain PyTorch never has, in
                    the first module whose result no node of its call has
    a buffer        the node that writes it
    a gradient,     in the order of backward: the reader of the differing parameter that is read
    a parameter     last in forward; everything behind it agrees

The whole graph runs in this process, node by node. If the graph computes what the model does, the
split has changed the loss: then the first node of the second stage is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopipe.batch.cut import slice_rows
from autopipe.batch.tree import flatten
from autopipe.checking.compare import TensorRow, off
from autopipe.checking.comparison import FirstNode
from autopipe.checking.random_ops import RandomNodes, drawing, random_nodes
from autopipe.checking.subject import SEED
from autopipe.checking.unsplit import built
from autopipe.eager.assigned_buffers import buffers_of
from autopipe.frontend.model_file import ModelFile
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import Graph, Node, State
from autopipe.ir.partition import partition
from autopipe.ir.tensors import tensors_in
from autopipe.planfile.contents import Plan
from autopipe.planners.driver.outcomes import last_reader
from autopipe.stages.lower import lower
from autopipe.stages.node_calls import NODE_NAME
from autopipe.stages.rng import stream
from autopipe.tracing.capture.low_precision import kept_by, parameters_in
from autopipe.tracing.capture.program import Program
from autopipe.tracing.traced import Trace

CLOSE = 1e-5
"""Results of one module that are as near are the same."""


def first_node(
    rows: Sequence[TensorRow], traced: Trace, plan: Plan, file: ModelFile, batch: Any
) -> FirstNode | None:
    """The node where the first difference begins; None: nothing differs.

    Args:
        traced: the model as ranks trace it.
        batch: the batch of the first step.
    """
    row = next((row for row in rows if row.wrong), None)
    if row is None:
        return None
    graph = traced.graph
    same_step = {r.what: r for r in rows if r.step == row.step}
    gradients = same_step["gradients"].wrong if "gradients" in same_step else ()
    if row.what == "loss":
        node, why = _in_forward(traced, plan, file, batch)
    elif row.what == "buffers":
        node = _reader(graph, row.wrong[0])
        why = f"the buffer {row.wrong[0]!r} differs after it"
        if not _readers(graph, row.wrong[0]):
            why = f"neither this node nor any other moves the buffer {row.wrong[0]!r}"
    else:
        names = row.wrong if row.what != "clipped norm" else gradients or row.wrong
        once = [name for name in names if _readers(graph, name) == 1]
        name = last_reader(graph, once or names)[0]  # of a tied one any use may be the wrong one
        node = _last(graph, name)
        why = f"of its backward the gradient of {name!r} is the first that differs"
        if row.what == "parameters":
            why = (
                f"its parameter {name!r} differs after the optimizer's step, its gradient does not"
            )
        elif row.what == "clipped norm":
            why = "gradients agree, and their norm over all ranks does not"
    return FirstNode(node.name, node.place, _stage(graph, plan, node), why)


def _reader(graph: Graph, state: str) -> Node:
    read = State(state)
    found = (node for node in graph.nodes if read in node.values())
    return next(found, graph.nodes[0])


def _readers(graph: Graph, state: str) -> int:
    read = State(state)
    return sum(read in node.values() for node in graph.nodes)


def _last(graph: Graph, state: str) -> Node:
    read = State(state)
    found = (node for node in reversed(graph.nodes) if read in node.values())
    return next(found, graph.nodes[-1])


def _stage(graph: Graph, plan: Plan, node: Node) -> int:
    """The stage that a node stands in, by the names of the stages' last nodes."""
    here = graph.index[node.name]
    ends = [graph.index.get(stage.last, len(graph.nodes)) for stage in plan.stages]
    return next((number for number, end in enumerate(ends) if here <= end), len(ends) - 1)


def _in_forward(traced: Trace, plan: Plan, file: ModelFile, batch: Any) -> tuple[Node, str]:
    """The first node whose result plain PyTorch never has, in the first module that differs."""
    graph = traced.graph
    rows = plan.batch.microbatch_rows(plan.mesh.dp)
    part = slice_rows(plan.inputs, flatten(batch), 0, rows)
    eager = _eager(plan, file, part, batch, random_nodes(traced))
    results = _by_nodes(traced, plan, file, part, rows)
    calls: dict[str, list[int]] = defaultdict(list)
    for position, node in enumerate(graph.nodes):
        for scope in node.scopes:
            calls[scope].append(position)
    agreed = -1
    for path, tensors in eager.modules:
        inside = calls.get(path, [])
        values = [
            value for position in inside for value in results.get(graph.nodes[position].name, ())
        ]
        if inside and any(all(off(v, t) > CLOSE for v in values) for t in tensors):
            between = graph.nodes[agreed + 1 : inside[-1] + 1]
            unlike = [node for node in between if eager.lacks(results.get(node.name, ()))]
            if unlike:
                why = f"its result is another one; {path!r} is the first module that differs"
                return unlike[0], why
            return graph.nodes[inside[-1]], f"what follows it in {path!r} is lost"
        agreed = max([agreed, *inside])
    second = plan.stages[min(1, len(plan.stages) - 1)]
    at = graph.index.get(second.first, len(graph.nodes) - 1)
    return graph.nodes[at], "the whole graph computes what the model does, the ranks' parts do not"


class _Eager(TorchFunctionMode):
    """The tensors of a forward of plain PyTorch.

    Attributes:
        modules: the results of each call of a module, by its path, in the order they end in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[tuple[str, list[Tensor]]] = []
        self._results: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        self._counts: dict[str, int] = defaultdict(int)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._results[tuple(tensor.shape)].append(tensor.detach().clone())
        return result

    def watch(self, path: str, module: nn.Module) -> Any:
        """A hook that notes the results of a module's calls."""

        def ended(module: nn.Module, args: Any, output: Any) -> None:
            number = self._counts[path]
            self._counts[path] += 1
            scope = f"{path}@{number}" if number else path
            self.modules.append((scope, [t.detach().clone() for t in tensors_in(output)]))

        return module.register_forward_hook(ended)

    def lacks(self, values: Sequence[Tensor]) -> bool:
        """Whether one of these float tensors equals none of the model's."""
        return any(
            all(off(value, known) > CLOSE for known in self._results.get(tuple(value.shape), ()))
            for value in values
            if value.is_floating_point()
        )


def _eager(
    plan: Plan, file: ModelFile, part: Mapping[str, Any], batch: Any, nodes: RandomNodes
) -> _Eager:
    """The first micro-batch's forward by the model itself."""
    model, kept, found = built(file), kept_by(plan), _Eager()
    with ExitStack() as until, torch.no_grad():
        for path, module in model.named_modules():
            if path:
                until.callback(found.watch(path, module).remove)
        until.enter_context(parameters_in(model, kept))
        until.enter_context(torch.random.fork_rng(devices=[]))
        if nodes.names:
            until.enter_context(drawing(model, file.loss, nodes, (SEED, 0, 0)))
        program = Program(model, batch, file.loss, plan.inputs, kept=kept, eager=True)
        with found:
            program(*(part[spec.path].clone() for spec in plan.inputs if spec.dtype != "python"))
    return found


def _by_nodes(
    traced: Trace, plan: Plan, file: ModelFile, part: Mapping[str, Any], rows: int
) -> dict[str, list[Tensor]]:
    """The results of each node of the whole graph, by name."""
    graph, model = traced.graph, built(file)
    with parameters_in(model, kept_by(plan)):
        named = {**graph.constants, **buffers_of(model), **dict(model.named_parameters())}
        (stage,) = partition(analyse(graph), [])
        states = {name: named[name] for name in stage.states}
        blocks = find_blocks(graph)
        lowered = lower(graph, stage, blocks, states, traced.reads, rows, last=True)
        found: dict[str, list[Tensor]] = {}
        with stream(SEED, 0, 0), torch.no_grad():
            _Recorder(lowered.module, found).run(*(part[path].clone() for path in stage.inputs))
    return found


class _Recorder(fx.Interpreter):
    """Runs a lowered stage and keeps the results of each node."""

    def __init__(self, module: fx.GraphModule, found: dict[str, list[Tensor]]) -> None:
        super().__init__(module)
        self._found = found

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        name = n.meta.get(NODE_NAME)
        if name is not None:
            self._found[name] = [tensor.detach().clone() for tensor in tensors_in(result)]
        return result

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        inner = self.fetch_attr(target)
        if isinstance(inner, fx.GraphModule):
            return _Recorder(inner, self._found).run(*args, **kwargs)
        return super().call_module(target, args, kwargs)
