"""Cut a graph in two: what each micro-batch runs, and the loss of the whole batch (`whole_loss`).

The loss has the nodes of the tail (`rows.loss_tail`), and nodes that serve them and depend on the
batch only. The model's values that it reads are embeddings: inputs of the loss, and results of the
other graph, which ends in nodes for their gradients. A parameter that the loss reads is copied by
such a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from autopipe.errors import ModelError
from autopipe.ir import check
from autopipe.ir.dataflow import Dataflow, analyse, is_random
from autopipe.ir.graph import (
    Arg,
    Graph,
    Input,
    Node,
    Ref,
    State,
    TensorSpec,
    Value,
    of_nodes,
    swap,
    values_in,
)
from autopipe.planfile.contents import BATCH
from autopipe.rows.loss_tail import tail
from autopipe.rows.row_dims import rows_lie
from autopipe.stages.whole_loss import Embedding, WholeLoss

_ASKED = f'loss_over="{BATCH}" was asked for'
_OTHERWISE = 'loss_over = "micro-batch" takes the mean of each micro-batch\'s own loss'


def cut_loss(graph: Graph, others: int = 0) -> WholeLoss:
    """Cut the loss off a traced graph.

    Args:
        others: the number of the graph's last results that are not of the loss; `rows` keeps them.

    Raises:
        ModelError: the loss reads a value that differs between micro-batches and has no rows, or a
            state that the model writes; names the user's line.
    """
    flow, count = analyse(graph), len(graph.outputs) - others
    results, other_results = graph.outputs[:count], graph.outputs[count:]
    tail_nodes = tail(flow, results)
    cutting = _Cutting(flow, tail_nodes, _with_local(flow, tail_nodes, results))
    reads = cutting.read(results)
    copies = {v: cutting.copy(v, n) for n, v in enumerate(reads) if isinstance(v, State)}
    embeddings = tuple(cutting.embedding(value, number) for number, value in enumerate(reads))
    cutting.check_writes(reads)
    cutting.check_others(other_results)
    sources = [Ref(copies[v].name) if isinstance(v, State) else v for v in reads]
    surrogate = _surrogate(list(zip(sources, embeddings, strict=True)), cutting.place)
    if not surrogate:
        raise ModelError(
            f"{_ASKED}, and the loss depends on nothing that a model has computed",
            hint="leave it out",
        )
    rows = cutting.rows([*copies.values(), *surrogate], (*sources, *other_results), embeddings)
    loss = cutting.loss(results, dict(zip(reads, embeddings, strict=True)))
    return WholeLoss(
        check.after("whole_loss, rows", rows), check.after("whole_loss, loss", loss), embeddings
    )


def _with_local(
    flow: Dataflow, tail_nodes: frozenset[int], results: Sequence[Arg]
) -> frozenset[int]:
    """The nodes of the tail, and those that compute for it from the batch alone."""
    positions, waiting = set(tail_nodes), list(tail_nodes)
    waiting += [flow.position(v) for v in values_in(tuple(results)) if isinstance(v, Ref)]
    while waiting:
        position = waiting.pop()
        if flow.local[position]:
            positions.add(position)
        if position in positions:
            before = flow.just_before(position)
            waiting += [p for p in before if flow.local[p] and p not in positions]
    return frozenset(positions)


@dataclass(frozen=True)
class _Cutting:
    """A graph that is being cut: the positions of its tail, and of all that its loss runs."""

    flow: Dataflow
    tail_nodes: frozenset[int]
    of_loss: frozenset[int]

    @property
    def place(self) -> str:
        """The user's line at which the loss begins."""
        graph = self.flow.graph
        return graph.nodes[min(self.tail_nodes)].place if self.tail_nodes else ""

    def read(self, results: Sequence[Arg]) -> list[Value]:
        """The values that the loss reads of the model: results of nodes, parameters, buffers."""
        graph = self.flow.graph
        read = [v for p in sorted(self.of_loss) for v in graph.nodes[p].values()]
        found = dict.fromkeys([*read, *values_in(tuple(results))])
        return [v for v in found if self._comes_from_rows(v)]

    def _comes_from_rows(self, value: Value) -> bool:
        if isinstance(value, Ref):
            return self.flow.position(value) not in self.of_loss
        return isinstance(value, State) and not self._is_constant(value)

    def _is_constant(self, value: State) -> bool:
        return self.flow.graph.states[value.name].kind == "constant"

    def copy(self, value: State, number: int) -> Node:
        """A node that reads a state for the loss, so that its gradient is summed as others are."""
        spec = self.flow.graph.spec(value)
        op = "aten.clone.default"
        return Node(f"whole_loss/clone/{number}", op, (value,), {}, (spec,), False, (), self.place)

    def embedding(self, value: Value, number: int) -> Embedding:
        """How one micro-batch's rows are placed in the whole value that the loss reads.

        Raises:
            ModelError: the value has no rows and differs between micro-batches; or the order of its
                rows is unknown.
        """
        spec, path = self.flow.graph.spec(value), f"embedding.{number}"
        numbers = spec.dtype.is_floating_point or spec.dtype.is_complex
        gradient = f"gradient.{number}" if numbers else None
        if not any(isinstance(dim, sympy.Expr) for dim in spec.shape):
            if isinstance(value, Ref) and (why := self._varies(value)):
                raise self._refusal(value, f"has no rows, and {why}")
            return Embedding(path, gradient, spec, None, 1)
        lie = rows_lie(self.flow, value)
        if lie is None:
            raise self._refusal(value, f"is {spec}, in which its rows (b) cannot be told apart")
        return Embedding(path, gradient, spec, *lie)

    def _varies(self, value: Ref) -> str:
        """Why a value is not the same in every micro-batch; empty: it is."""
        flow, nodes = self.flow, self.flow.graph.nodes
        writers = flow.writers.get(flow.root[value], ())
        for position in sorted(flow.with_all_before([flow.position(value), *writers])):
            if is_random(nodes[position]):
                return "is drawn in each micro-batch"
            if any(isinstance(read, Input) for read in nodes[position].values()):
                return "is another number in each micro-batch"
        return ""

    def check_writes(self, read: Sequence[Value]) -> None:
        """Refuse a loss that writes a tensor of others, or reads a buffer that is written, or what
        is written once the loss has read it.

        Raises:
            ModelError: names the buffer, or the line that writes.
        """
        flow, nodes = self.flow, self.flow.graph.nodes
        for value in read:
            writers = flow.writers.get(flow.root[value], ())
            first = min((p for p in flow.users[value] if p in self.of_loss), default=len(nodes))
            late = [p for p in writers if p in self.of_loss or isinstance(value, State)]
            late += [p for p in writers if p > first]
            if late:
                raise self._refusal(value, f"is written in place at {nodes[late[0]].place}")
        for root, writers in flow.writers.items():
            if isinstance(root, State) and (late := [p for p in writers if p in self.tail_nodes]):
                raise self._refusal(root, f"is written by the loss at {nodes[late[0]].place}")

    def check_others(self, others: Sequence[Arg]) -> None:
        """Refuse results of a model that compare rows: no single micro-batch has them.

        Raises:
            ModelError: names the line that makes one.
        """
        for value in values_in(tuple(others)):
            if isinstance(value, Ref) and self.flow.position(value) in self.tail_nodes:
                place = self.flow.graph.nodes[self.flow.position(value)].place
                raise ModelError(
                    f"{place}: outputs=True was asked for, and the model returns what compares the "
                    "rows of a batch, which no micro-batch has",
                    hint="evaluate(batch) gives the loss; return the embeddings alone",
                )

    def _refusal(self, value: Value, what: str) -> ModelError:
        maker = self.flow.graph.nodes[self.flow.position(value)] if isinstance(value, Ref) else None
        place = maker.place if maker is not None and maker.place else self.place
        name = f"what {maker.short} makes" if maker is not None else f"{value}"
        return ModelError(
            f"{place + ': ' if place else ''}{_ASKED}, and {name}, which the loss reads, {what}",
            hint=_OTHERWISE,
        )

    def rows(
        self, more: Sequence[Node], results: tuple[Arg, ...], embeddings: Sequence[Embedding]
    ) -> Graph:
        """The graph of a micro-batch: all but the tail, and `more`; the last node is the scalar."""
        graph, flow = self.flow.graph, self.flow
        of_results = [flow.position(v) for v in values_in(results) if v in flow.root]
        needed = {
            p for p in range(len(graph.nodes)) if p not in self.tail_nodes and not flow.local[p]
        }
        needed = flow.with_all_before([*needed, *(p for p in of_results if p >= 0)])
        nodes = (*(graph.nodes[p] for p in sorted(needed)), *more)
        seeds = {e.gradient: e.spec for e in embeddings if e.gradient is not None}
        return of_nodes(
            replace(graph, inputs={**graph.inputs, **seeds}), nodes, (Ref(more[-1].name), *results)
        )

    def loss(self, results: Sequence[Arg], of: Mapping[Value, Embedding]) -> Graph:
        """The graph of the loss, over what the model has made of all rows."""
        graph = self.flow.graph
        values: dict[Value, Value] = {value: Input(e.path) for value, e in of.items()}
        nodes = tuple(graph.nodes[position].reading(values) for position in sorted(self.of_loss))
        inputs = {**graph.inputs, **{e.path: e.spec for e in of.values()}}
        found = of_nodes(replace(graph, inputs=inputs), nodes, swap(tuple(results), values))
        read = {v.path for n in nodes for v in n.values() if isinstance(v, Input)}
        read |= {v.path for v in values_in(found.outputs) if isinstance(v, Input)}
        return replace(found, inputs={p: s for p, s in found.inputs.items() if p in read})


def _surrogate(of: Sequence[tuple[Value, Embedding]], place: str) -> list[Node]:
    """Nodes that compute sum(e * gradient) over the embeddings that have one; empty: none has.

    Of complex ones real and imaginary parts are multiplied each with each.
    """
    trained = [(value, e) for value, e in of if e.gradient is not None]
    doubles = any(e.spec.dtype in (torch.float64, torch.complex128) for _, e in trained)
    wide = torch.float64 if doubles else torch.float32
    nodes: list[Node] = []

    def add(op: str, args: tuple[Arg, ...], result: TensorSpec, **kwargs: Arg) -> Ref:
        name = f"whole_loss/{op.split('.')[1]}/{len(nodes)}"
        nodes.append(Node(name, op, args, kwargs, (result,), False, (), place))
        return Ref(name)

    total: Ref | None = None
    for value, embedding in trained:
        spec, seed = embedding.spec, Input(embedding.gradient or "")
        pairs: list[tuple[Arg, ...]] = [(value, seed)]
        if spec.dtype.is_complex:
            spec, halves = TensorSpec(spec.shape, spec.dtype.to_real()), ("real", "imag")
            pairs = [tuple(add(f"aten.{h}.default", (e,), spec) for e in pairs[0]) for h in halves]
        for pair in pairs:
            product = add("aten.mul.Tensor", pair, spec)
            part = add("aten.sum.default", (product,), TensorSpec((), wide), dtype=wide)
            scalar = TensorSpec((), wide)
            total = part if total is None else add("aten.add.Tensor", (total, part), scalar)
    return nodes
