"""Which strategy each op takes: an integer linear program over placements, solved to the optimum.

    x[v, s]      1 if node v takes its strategy s                        binary; one s for each v
    e[u, v, a, b]    value u is made as a and wanted as b by v           = x of both ends, summed
    z[u, a, b]   u is converted from a to b, for whoever wants it        >= each e of u, a, b

    minimize   sum x * seconds of the op, divided by the ranks if its tensors are shards
             + sum x * PRICE of bytes that every rank holds, for parameters
             + sum z * seconds of the conversion, value and gradient

The formulation is Alpa's (Zheng et al., OSDI 2022, section 4.2) but for z: there, and in
AutoParallel, a conversion is paid for on each edge. Shared, q, k and v have one all-reduce of their
input's gradient without being told so.

Blocks of one class take the same strategies, so they have the same variables: a model of 32 layers
is a program of one layer, whose costs count 32 times, and of what is outside. That is exact among
the plans in which layers are alike; `alike=False` looks at all.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe import cost
from autopipe.blocks import Block
from autopipe.cluster import Device, Link
from autopipe.dataflow import Dataflow
from autopipe.demands import demands
from autopipe.errors import AutopipeError
from autopipe.graph import Input, Ref, State, Value, bytes_at, shape_at, values_in
from autopipe.op import Model
from autopipe.placements import ALL_REDUCE, I, Move, Placement, R, S, Sharding, moves
from autopipe.strategies import strategies

PRICE = 100
"""What a matrix that every rank holds whole costs, in passes of its bytes over the link.

By time alone it is often best to replicate everything: ranks that do not share work have nothing to
tell each other. Who asks for tensor parallelism wants the parameters divided."""

START = 2000
"""What a collective costs besides its bytes, in bytes. For the same reason no link's latency: it
would outweigh all of a small model. What it does to the step, the estimate says."""


class Axis(NamedTuple):
    """The ranks that a graph is dealt out to, and what joins them."""

    ranks: int
    link: Link
    device: Device

    def seconds(self, move: Move | None, size: float, *, strided: bool = False) -> float:
        """Of a collective on a tensor of `size` bytes as a whole (see `placements.Move`).

        Ranks send runs of memory: shards that are none (`strided`) are put together or taken apart
        by a copy of the whole, which is read and written.
        """
        if move is None:
            return 0.0
        copied = 2 * size / self.device.bandwidth if strided else 0.0
        return (START + move.sent(size, self.ranks)) / self.link.bandwidth + copied


def shard(
    flow: Dataflow,
    blocks: Sequence[Block],
    axis: Axis,
    rows: int,
    *,
    sequence: bool = False,
    partial: bool = True,
    alike: bool = True,
) -> Sharding:
    """The cheapest way to deal a graph out to the ranks of an axis.

    Args:
        rows: of a micro-batch; decides what computing and sending weigh against each other.
        sequence: also consider shards of the batch's second dim, between the layers.
        partial: let gradients of whole parameters be partial sums, which are summed once a step.
        alike: give all blocks of a class the same strategies.

    Raises:
        AutopipeError: there is no solution; then it is a bug, as everything can be replicated.
    """
    model = Model(flow, axis.ranks)
    names = _Names(model, blocks if alike else ())
    choices = _choices(model, names, sequence, partial)
    costs = _costs(model, names, axis, rows, memory=sequence)
    return _solve(model, names, choices, costs, axis, rows)


class _Names:
    """The variable of each node and state: one for all in the same place of a class of blocks."""

    def __init__(self, model: Model, blocks: Sequence[Block]) -> None:
        graph = model.graph
        self.nodes: dict[str, Hashable] = {node.name: node.name for node in graph.nodes}
        self.states: dict[str, Hashable] = {name: State(name) for name in graph.states}
        self.enough = set(self.nodes)
        """Nodes whose strategies are those of all of their class: of its first two members."""
        seen: Counter[Hashable] = Counter()
        for block in blocks:
            home = block.path.partition("@")[0] + "."
            nodes = graph.nodes[block.first : block.stop]
            # The first block may get no gradient of its input, or have a frozen weight.
            carrying = tuple(value in model.carrying for node in nodes for value in node.values())
            kind = block.kind, carrying
            seen[kind] += 1
            for offset, node in enumerate(nodes):
                self.nodes[node.name] = (kind, offset)
                if seen[kind] > 2:
                    self.enough.discard(node.name)
                for value in node.values():
                    if isinstance(value, State) and value.name.startswith(home):
                        self.states[value.name] = (kind, value.name.removeprefix(home))

    def of(self, value: Value) -> Hashable:
        """The variable of whatever makes a value."""
        if isinstance(value, Ref):
            return self.nodes[value.node]
        return self.states[value.name] if isinstance(value, State) else value


Positional = tuple[tuple[Placement, ...], Placement]
"""A strategy without names: its inputs in their order, and its output."""

Want = tuple[Hashable, int]
"""A variable, and which of its inputs."""

_RESULTS = "the graph's results"

Costs = Callable[[Hashable, Positional], float]
"""Seconds of a variable's strategy."""

Choices = dict[Hashable, dict[Positional, None]]
"""The strategies of each variable."""


def _choices(model: Model, names: _Names, sequence: bool, partial: bool) -> Choices:
    """What each variable can be; a state takes no inputs."""
    graph, found = model.graph, Choices()
    asked = demands(model)
    shards: dict[Hashable, dict[Placement, None]] = defaultdict(dict)
    for name, state in graph.states.items():
        value = State(name)
        lies: list[Placement] = [I, R] if state.trainable and partial else [I]
        if state.kind == "parameter" and value not in model.fixed:
            each = [S(dim) for dim in range(len(state.spec.shape))]
            wanted = dict.fromkeys([*each, *asked.get(value, ())])
            lies += [p for p in wanted if model.can_shard(value, p)]
        variable = names.of(value)
        found.setdefault(variable, {}).update(dict.fromkeys(((), lie) for lie in lies))
        shards[variable] |= dict.fromkeys(lie for lie in lies if lie.sharded)
    for path, spec in graph.inputs.items():
        leaf = Input(path)
        found[leaf] = {((), I): None}
        if sequence and len(spec.shape) > 1 and model.can_shard(leaf, S(1)):
            shards[leaf] = {S(1): None}
    for node in graph.nodes:
        if node.name not in names.enough:
            continue
        variable = names.nodes[node.name]
        own = found.setdefault(variable, {})
        for strategy in strategies(model, node, lambda value: shards[names.of(value)]):
            own[tuple(strategy.inputs.values()), strategy.output] = None
            if strategy.output.sharded:
                shards[variable][strategy.output] = None
    return found


class _Program:
    """Variables with their costs, and rows that bound sums of them."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.whole: list[int] = []
        self._rows: list[tuple[list[int], list[float], float, float]] = []

    def variable(self, seconds: float, *, whole: bool = False) -> int:
        """Between 0 and 1."""
        self.costs.append(seconds)
        self.whole.append(int(whole))
        return len(self.costs) - 1

    def sums(self, plus: Sequence[int], minus: Sequence[int], low: float, high: float) -> None:
        """low <= the sum of some variables less that of others <= high."""
        factors = [1.0] * len(plus) + [-1.0] * len(minus)
        self._rows.append(([*plus, *minus], factors, low, high))

    def solve(self) -> NDArray[np.float64]:
        """The best values of all variables."""
        # Here, for it takes as long to import as a rank that plans nothing takes for much else.
        import scipy.optimize
        import scipy.sparse

        columns = np.concatenate([np.array(row[0], int) for row in self._rows])
        factors = np.concatenate([np.array(row[1]) for row in self._rows])
        begins = np.cumsum([0, *(len(row[0]) for row in self._rows)])
        matrix = scipy.sparse.csr_array(
            (factors, columns, begins), shape=(len(self._rows), len(self.costs))
        )
        costs = np.array(self.costs)
        found = scipy.optimize.milp(
            costs / max(costs.max(), 1e-30) * 1e3,  # HiGHS's tolerances are absolute
            constraints=scipy.optimize.LinearConstraint(
                matrix, [row[2] for row in self._rows], [row[3] for row in self._rows]
            ),
            integrality=self.whole,
            bounds=scipy.optimize.Bounds(0, 1),
            options={"mip_rel_gap": 0},
        )
        if found.x is None:
            raise AutopipeError(f"the placements of tensors have no solution: {found.message}")
        values: NDArray[np.float64] = found.x
        return values


def _solve(
    model: Model, names: _Names, choices: Choices, costs: Costs, axis: Axis, rows: int
) -> Sharding:
    program = _Program()
    x = {
        variable: [program.variable(costs(variable, choice), whole=True) for choice in of_it]
        for variable, of_it in choices.items()
    }
    for of_one in x.values():
        program.sums(of_one, [], 1, 1)

    choices[_RESULTS], x[_RESULTS] = {((I,), I): None}, [program.variable(0.0)]
    program.sums(x[_RESULTS], [], 1, 1)

    def by_placement(
        variable: Hashable, position: int | None, value: Value
    ) -> dict[Placement, list[int]]:
        """The strategies of a variable by where an input of theirs, or their output, lies."""
        found: dict[Placement, list[int]] = defaultdict(list)
        for number, (inputs, output) in enumerate(choices[variable]):
            lies = output if position is None else inputs[position]
            found[model.normal(value, lies)].append(x[variable][number])
        return found

    edges: dict[tuple[Hashable, Want], dict[tuple[Placement, Placement], int]] = {}
    # A conversion is paid for once by all who want it of one value, and so in every block.
    together: Counter[tuple[Hashable, tuple[Want, ...]]] = Counter()
    example: dict[Hashable, Value] = {}
    for value, wants in _users(model, names).items():
        maker = names.of(value), value.output if isinstance(value, Ref) else 0
        example.setdefault(maker, value)
        together[maker, tuple(wants)] += 1
        for want in wants:
            if (maker, want) in edges:
                continue
            made = by_placement(maker[0], None, value)
            wanted = by_placement(*want, value)
            differentiable = value in model.carrying
            edge = {
                (a, b): program.variable(0.0)
                for a in made
                for b in wanted
                if moves(a, b, differentiable) is not None
            }
            edges[maker, want] = edge
            for a, of_a in made.items():
                program.sums([e for (s, _), e in edge.items() if s == a], of_a, 0, 0)
            for b, of_b in wanted.items():
                program.sums([e for (_, t), e in edge.items() if t == b], of_b, 0, 0)
    for (made_by, consumers), count in together.items():
        converted: dict[tuple[Placement, Placement], int] = {}
        for want in consumers:
            for (a, b), e in edges[made_by, want].items():
                if a == b:
                    continue
                if (a, b) not in converted:
                    seconds = _conversion(model, axis, example[made_by], rows, a, b)
                    converted[a, b] = program.variable(count * seconds)
                program.sums([converted[a, b]], [e], 0, 1)

    values = program.solve()
    picked = {
        variable: max(zip(of_one, choices[variable], strict=True), key=lambda p: values[p[0]])[1]
        for variable, of_one in x.items()
    }
    states = {name: picked[variable][1] for name, variable in names.states.items()}
    nodes = {name: picked[variable] for name, variable in names.nodes.items()}
    return Sharding(
        axis.ranks,
        {name: placement for name, placement in states.items() if placement != I},
        {name: lie for name, lie in nodes.items() if {*lie[0], lie[1]} != {I}},
    )


def _users(model: Model, names: _Names) -> dict[Value, dict[Want, None]]:
    """Who reads each value; the graph's results do, as they are."""
    users: dict[Value, dict[Want, None]] = defaultdict(dict)
    for node in model.graph.nodes:
        for position, value in enumerate(model.tensors(node)):
            users[value][names.nodes[node.name], position] = None
    for value in dict.fromkeys(values_in(model.graph.outputs)):
        users[value][_RESULTS, 0] = None
    return users


def _conversion(
    model: Model, axis: Axis, value: Value, rows: int, source: Placement, target: Placement
) -> float:
    """Seconds of a conversion of a value and of its gradient."""
    spec = model.graph.spec(value)
    size = bytes_at(spec, rows)
    strided = any(_is_strided(shape_at(spec, rows), lies) for lies in (source, target))
    sent = moves(source, target, value in model.carrying) or ()
    # Of conversions that send nothing, rather fewer.
    least = 1e-4 * size / axis.link.bandwidth
    return least + sum(axis.seconds(move, size, strided=strided) for move in sent)


def _is_strided(shape: Sequence[int], placement: Placement) -> bool:
    """Whether a rank's shard is in several pieces of the whole tensor's memory."""
    if not placement.sharded:
        return False
    return placement.segments != 1 or math.prod(shape[: placement.dim]) > 1


def _costs(model: Model, names: _Names, axis: Axis, rows: int, *, memory: bool = False) -> Costs:
    """Seconds of a variable's strategy, all that have the variable taken together.

    Without `memory` arithmetic counts alone: compilers fuse what is bound by memory, and no norm is
    worth sending more, or as much in two collectives in the place of one.
    """
    graph = model.graph
    computing: dict[Hashable, float] = defaultdict(float)
    bandwidth = axis.device.bandwidth if memory else math.inf
    device = replace(axis.device, launch=0.0, bandwidth=bandwidth)
    forward, backward = cost.seconds(cost.costs(graph), rows, device)
    for node, both in zip(graph.nodes, forward + backward, strict=True):
        computing[names.nodes[node.name]] += float(both)
    holding: dict[Hashable, float] = defaultdict(float)
    members: Counter[Hashable] = Counter()
    for name, state in graph.states.items():
        if state.kind == "parameter":
            holding[names.of(State(name))] += bytes_at(state.spec, rows)
            members[names.of(State(name))] += 1
    matrices = {names.of(State(n)) for n, s in graph.states.items() if len(s.spec.shape) > 1}

    def seconds(variable: Hashable, choice: Positional) -> float:
        inputs, output = choice
        share = 1 / axis.ranks if any(p.sharded for p in (*inputs, output)) else 1.0
        if variable not in holding:
            return computing[variable] * share
        size = holding[variable]
        price = PRICE * size / axis.link.bandwidth * share if variable in matrices else 0.0
        # As if each micro-batch had the sum that a step has once: of equals, whole gradients win.
        many = members[variable]
        return price + (many * axis.seconds(ALL_REDUCE, size / many) if output == R else 0.0)

    return seconds
