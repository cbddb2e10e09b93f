"""Checks strategies op by op: shards its tensors, runs it on each rank, assembles the results.

    whole      y = op(x, w)                     dx, dw of the gradient dy
    dealt      y_r = op_r(x_r, w_r)             on each rank r its local form, of `shard_graph`
    the claim  put together, the y_r are y; for a gradient dealt out as y's dual placement says, so
               are dx_r and dw_r put together dx and dw

    placement    a value                a gradient
    I            equal on all           equal on all
    R            equal on all           parts that sum to it
    P            parts that sum to it   equal on all
    S            own part               own part

All in float64: what the claim says, it says exactly.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import sympy
import torch
from torch import Tensor

from autopipe.ir.dataflow import analyse, is_random
from autopipe.ir.graph import (
    READ_OP,
    Graph,
    Input,
    Node,
    Ref,
    State,
    StateSpec,
    TensorSpec,
    Value,
    at_batch,
    resolve,
    shape_at,
)
from autopipe.planfile.placements import I, P, Placement, R, S, Sharding
from autopipe.sharding.collectives import own_part, together
from autopipe.sharding.fused_segments import demands
from autopipe.sharding.local_graph import shard_graph
from autopipe.sharding.op import Model, Op, Strategy
from autopipe.sharding.strategies import RULES, strategies
from tests.support.simulated import Meeting, everywhere

ROWS = 3
TOLERANCE = 1e-9

_POSITIVE = frozenset("log log2 sqrt rsqrt pow reciprocal log_softmax batch_norm".split())
"""Ops with an input that must be above zero, or that are steep near it."""

_WIDE = {torch.float32, torch.bfloat16, torch.float16}


def _grouped(x: Tensor, w: Tensor, ends: Tensor, *_: object) -> Tensor:
    """`_grouped_mm`, which has no kernel in float64."""
    bounds = pairwise([0, *ends.tolist()])
    return torch.cat([x[first:end] @ own for (first, end), own in zip(bounds, w, strict=True)])


@dataclass
class Findings:
    """What was looked at: how many strategies of each op have shards, and the claims not true."""

    sharded: dict[str, set[str]] = field(default_factory=dict)
    checked: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, other: "Findings") -> None:
        for op, kinds in other.sharded.items():
            self.sharded.setdefault(op, set()).update(kinds)
        self.checked += other.checked
        self.wrong += other.wrong


def check(graphs: Iterable[Graph], ranks: int) -> Findings:
    """Every strategy of every distinct op of some graphs."""
    found: dict[str, tuple[Graph, dict[Value, dict[Placement, None]]]] = {}
    for graph in graphs:
        for alone, shards in _alone(graph, ranks):
            known = found.setdefault(str(alone), (alone, {}))[1]
            for value, placements in shards.items():
                known.setdefault(value, {}).update(placements)
    findings = Findings()
    for alone, shards in found.values():
        findings.add(check_alone(alone, shards, ranks))
    return findings


def _alone(graph: Graph, ranks: int) -> Iterable[tuple[Graph, dict[Value, dict[Placement, None]]]]:
    """Each op as a graph of its own, and the shards in which its inputs may come.

    These are what reaches it when anything at all is dealt out, and some segments besides.
    """
    model = Model(analyse(graph), ranks)
    asked = demands(model)
    reach: dict[Value, dict[Placement, None]] = {}

    def seed(value: Value) -> None:
        every = [S(dim) for dim in range(len(graph.spec(value).shape))]
        reach[value] = dict.fromkeys([*every, *asked.get(value, ())])

    for name in graph.states:
        seed(State(name))
    for path in graph.inputs:
        seed(Input(path))
    for node in graph.nodes:
        tensors = [v for v in dict.fromkeys(node.values()) if model.is_tensor(v)]
        known = node.op.startswith("aten.") or node.short in RULES
        if known and node.op != READ_OP and tensors:
            shards = {}
            for value in tensors:
                dims = range(len(graph.spec(value).shape))
                more = (S(dim, segments) for dim in dims for segments in (1, 2, 3))
                shards[value] = dict.fromkeys([*reach[value], *more])
            renamed: dict[Value, Value] = {v: State(f"{n}") for n, v in enumerate(tensors)}
            yield (
                _graph(graph, node, renamed, model),
                {renamed[v]: placements for v, placements in shards.items()},
            )
        for number in range(len(node.outputs)):
            reach[Ref(node.name, number)] = {}
        for strategy in strategies(model, node, lambda value: reach[value]):
            if strategy.output.sharded:
                for number in range(len(node.outputs)):
                    reach[Ref(node.name, number)][strategy.output] = None


def _graph(graph: Graph, node: Node, renamed: Mapping[Value, Value], model: Model) -> Graph:
    def again(arg: Any) -> Any:
        if isinstance(arg, Value):
            return renamed[arg]
        if isinstance(arg, tuple):
            return tuple(map(again, arg))
        return torch.float64 if isinstance(arg, torch.dtype) and arg in _WIDE else arg

    def wide(spec: TensorSpec) -> TensorSpec:
        return TensorSpec(spec.shape, again(spec.dtype))

    args, kwargs = again(node.args), {key: again(arg) for key, arg in node.kwargs.items()}
    if is_random(node):  # with nothing dropped: the numbers themselves differ from rank to rank
        at = 4 if "attention" in node.op else 1
        args = (*args[:at], 0.0, *args[at + 1 :])
    alone = replace(
        node,
        name="node",
        args=args,
        kwargs=kwargs,
        outputs=tuple(spec and wide(spec) for spec in node.outputs),
        scopes=(),
        place="",
    )
    states = {
        new.name: StateSpec(wide(graph.spec(old)), "parameter", trainable=old in model.carrying)
        for old, new in renamed.items()
        if isinstance(new, State)
    }
    return Graph({}, states, (alone,), ())


def check_alone(graph: Graph, shards: Mapping[Value, Iterable[Placement]], ranks: int) -> Findings:
    """Every strategy of the only op of a graph."""
    model = Model(analyse(graph), ranks)
    (node,) = graph.nodes
    findings = Findings()
    op = Op(model, node, lambda value: ())
    whole = _Run(graph, node, model, _inputs(op))
    for strategy in strategies(model, node, lambda value: shards.get(value, ())):
        findings.checked += 1
        lies = [*strategy.inputs.values(), strategy.output]
        if any(lie not in (I, R) for lie in lies):
            kinds = "".join(lie.kind for lie in lies)
            findings.sharded.setdefault(op.name, set()).add(kinds)
        try:
            difference = whole.difference(strategy, ranks)
        except (RuntimeError, ValueError, IndexError, AssertionError, TypeError) as error:
            difference = f"{type(error).__name__}: {error}".splitlines()[0]
        if difference:
            inputs = ", ".join(map(str, strategy.inputs.values()))
            findings.wrong.append(
                f"{node.op}, {ranks} ranks: {inputs} -> {strategy.output}: {difference}\n    {node}"
            )
    return findings


def _inputs(op: Op) -> dict[str, Tensor]:
    """Random values for the states of a graph, such that the op takes them."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for value in op.inputs:
        assert isinstance(value, State)
        spec = op.model.graph.spec(value)
        shape = shape_at(spec, ROWS)
        if spec.dtype.is_floating_point:
            x = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
            if op.name not in _POSITIVE:
                x *= torch.randint(0, 2, shape, generator=generator) * 2 - 1
        elif spec.dtype == torch.bool:
            x = torch.randint(0, 2, shape, generator=generator).bool()
        else:
            x = torch.randint(*_range(op, value), shape, generator=generator)
            if op.name == "cross_entropy_loss":
                x.view(-1)[1] = op["ignore_index"]
            if op.name == "vocabulary_loss":
                x.view(-1)[1] = op["ignored"]
            if op.name == "embedding" and op["padding_idx"] >= 0:
                x.view(-1)[1] = op["padding_idx"]
            if op.name == "_grouped_mm":  # where the groups end
                x = x.sort().values
                x[-1] = shape_at(op.model.graph.spec(op["self"]), ROWS)[0]
            x = x.to(spec.dtype)
        found[value.name] = x
    return found


def _range(op: Op, value: Value) -> tuple[int, int]:
    """The bounds of an input of whole numbers: positions in another, or numbers to divide by."""

    def below(of: Any, dim: int) -> tuple[int, int]:
        return 0, shape_at(op.model.graph.spec(of), ROWS)[dim]

    if op.name in ("embedding", "vocabulary_loss"):
        return below(op["weight"], 0)
    if op.name == "cross_entropy_loss":
        return below(op["self"], 1)
    if op.name == "index":
        return below(op["self"], op["indices"].index(value))
    return below(op["self"], op["dim"]) if op.name == "gather" else (1, 5)


@dataclass
class _Run:
    """An op on whole tensors: what it makes, and the gradients of one made up for that."""

    graph: Graph
    node: Node
    model: Model
    inputs: dict[str, Tensor]

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.made, leaves = self.on(self.graph, self.inputs)
        self.refs = [Ref("node", n) for n, s in enumerate(self.node.outputs) if s is not None]
        self.above = {
            ref: _random(self.generator, self.made[ref])
            for ref in self.refs
            if ref in self.model.carrying and self.made[ref].requires_grad
        }
        self.gradients = self._back(self.made, leaves, self.above)

    def on(
        self, graph: Graph, inputs: Mapping[str, Tensor]
    ) -> tuple[dict[Value, Tensor], dict[str, Tensor]]:
        """All that the nodes of a graph make, and the leaves that have gradients."""
        values: dict[Value, Tensor] = {}
        leaves: dict[str, Tensor] = {}
        for name, tensor in inputs.items():
            if graph.states[name].trainable:
                tensor = leaves[name] = tensor.clone().requires_grad_()
            values[State(name)] = tensor.clone()  # ops may write over it
        for node in graph.nodes:
            with torch.set_grad_enabled(node.grad):
                made = (_grouped if node.short == "_grouped_mm" else resolve(node.op))(
                    *_given(node.args, values),
                    **{key: _given(arg, values) for key, arg in node.kwargs.items()},
                )
            for number, one in enumerate(made if node.packed else (made,)):
                spec = node.outputs[number]
                if spec is not None:
                    promised = shape_at(spec, ROWS), spec.dtype
                    assert (tuple(one.shape), one.dtype) == promised, (
                        f"{node.name} makes {one.dtype} {list(one.shape)}, not {spec}"
                    )
                    values[Ref(node.name, number)] = one
        return values, leaves

    def _back(
        self,
        made: Mapping[Value, Tensor],
        leaves: Mapping[str, Tensor],
        above: Mapping[Ref, Tensor],
    ) -> dict[str, Tensor]:
        if not above or not leaves:
            return {}
        found = torch.autograd.grad(
            [made[ref] for ref in above],
            list(leaves.values()),
            list(above.values()),
            allow_unused=True,
        )
        pairs = zip(leaves.items(), found, strict=True)
        return {name: torch.zeros_like(x) if g is None else g for (name, x), g in pairs}

    def difference(self, strategy: Strategy, ranks: int) -> str:
        """What a strategy claims and is not so; nothing if all is."""
        lies = {v.name: lie for v, lie in strategy.inputs.items() if isinstance(v, State)}
        sharding = Sharding(
            ranks, lies, {"node": (tuple(strategy.inputs.values()), strategy.output)}
        )
        flow = self.model.flow
        graphs = [shard_graph(flow, sharding, rank) for rank in range(ranks)]
        inputs = {n: deal(self.generator, x, _at(lies[n]), ranks) for n, x in self.inputs.items()}
        output = _at(strategy.output)
        above = {r: deal(self.generator, g, dual(output), ranks) for r, g in self.above.items()}

        def run(rank: int) -> tuple[dict[Value, Tensor], dict[str, Tensor]]:
            made, leaves = self.on(graphs[rank], {n: x[rank] for n, x in inputs.items()})
            return made, self._back(made, leaves, {r: g[rank] for r, g in above.items()})

        if any(node.op.startswith("autopipe.") for node in graphs[0].nodes):
            outcomes = everywhere(Meeting(ranks), run)
        else:
            outcomes = [run(rank) for rank in range(ranks)]
        for ref in self.refs:
            parts = [made[ref] for made, _ in outcomes]
            problem = compare(parts, output, self.made[ref])
            if problem:
                return f"the result {problem}"
        for name, gradient in self.gradients.items():
            parts = [gradients[name] for _, gradients in outcomes]
            problem = compare(parts, dual(_at(lies[name])), gradient)
            if problem:
                return f"the gradient of [{name}] {problem}"
        return ""


def deal(generator: torch.Generator, whole: Tensor, lies: Placement, ranks: int) -> list[Tensor]:
    """What each rank has of a value that lies so."""
    if lies.sharded:
        return [own_part(whole, lies, ranks, rank).contiguous() for rank in range(ranks)]
    if lies != P:
        return [whole] * ranks
    parts = [_random(generator, whole) for _ in range(ranks - 1)]
    return [*parts, whole - sum(parts)]


def _random(generator: torch.Generator, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)


def dual(lies: Placement) -> Placement:
    """How the gradient lies of a value that lies so."""
    return {R: P, P: R}.get(lies, lies)


def _at(lies: Placement) -> Placement:
    return lies.at(ROWS)


def _given(arg: Any, values: Mapping[Value, Tensor]) -> Any:
    if isinstance(arg, Value):
        return values[arg]
    if isinstance(arg, Placement):
        return str(_at(arg))
    if isinstance(arg, tuple):
        return tuple(_given(item, values) for item in arg)
    return at_batch(arg, ROWS) if isinstance(arg, sympy.Expr) else arg


def compare(parts: Sequence[Tensor], lies: Placement, whole: Tensor) -> str:
    """What is wrong with what the ranks have of a whole that is to lie so."""
    if lies.sharded:
        found = [together(parts, lies, whole.shape[lies.dim])]
    else:
        found = [torch.stack(list(parts)).sum(0)] if lies == P else list(parts)
    for one in found:
        if one.shape != whole.shape or one.dtype != whole.dtype:
            return f"is {one.dtype} {list(one.shape)}, not {whole.dtype} {list(whole.shape)}"
        if not torch.allclose(one, whole, TOLERANCE, TOLERANCE, equal_nan=True):
            off = (one.double() - whole.double()).abs().max().item()
            return f"is off by {off:.2g}"
    return ""
