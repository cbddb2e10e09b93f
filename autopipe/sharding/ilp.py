"""Choose a strategy for each op: an integer linear program over placements, solved to the optimum.

    x[v, s]      1 if node v takes its strategy s                        binary; one s for each v
    e[u, v, a, b]    value u is made as a and wanted as b by v           = x of both ends, summed
    z[u, a, b]   u is converted from a to b, for all its readers         >= each e of u, a, b

    minimize   sum x * seconds of the op, divided by the ranks if its tensors are shards
             + sum x * PRICE of bytes that every rank holds, for parameters
             + sum z * seconds of the conversion, value and gradient

The formulation is Alpa's (Zheng et al., OSDI 2022, section 4.2) but for z: there, and in
AutoParallel, each edge pays for its own conversion. Here q, k and v share one all-reduce of their
input's gradient without a special rule.

Blocks of one class take the same strategies, so they have the same variables: a model of 32 layers
is a program of one layer, whose costs count 32 times, and of the nodes outside. That is exact among
the plans with equal layers; `alike=False` searches all plans.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopipe.cluster.cluster import Device, Link
from autopipe.ir import op_costs, op_seconds
from autopipe.ir.blocks import Block
from autopipe.ir.dataflow import Dataflow
from autopipe.ir.graph import Input, Ref, State, Value, bytes_at, shape_at, values_in
from autopipe.planfile.placements import ALL_REDUCE, I, Move, Placement, R, S, Sharding, moves
from autopipe.sharding.fused_segments import demands
from autopipe.sharding.milp import IntegerProgram
from autopipe.sharding.op import Model
from autopipe.sharding.strategies import strategies

PRICE = 100
"""The cost of a replicated matrix, in passes of its bytes over the link.

By time alone it is often best to replicate everything, since ranks then send nothing. A user who
asks for tensor parallelism wants the parameters sharded."""

START = 2000
"""The fixed cost of a collective, in bytes. For the same reason it is not the link's latency, which
would outweigh all else in a small model; the planner's estimate includes the latency."""


class AxisCosts(NamedTuple):
    """The ranks over which a graph is sharded, their device and their link."""

    ranks: int
    link: Link
    device: Device

    def seconds(self, move: Move | None, size: float, *, strided: bool = False) -> float:
        """Seconds of a collective on a tensor of `size` bytes in total (see `placements.Move`).

        Ranks send contiguous memory: for shards that are not (`strided`), a copy of the whole
        tensor, one read and one write, is added.
        """
        if move is None:
            return 0.0
        copied = 2 * size / self.device.bandwidth if strided else 0.0
        return (START + move.sent(size, self.ranks)) / self.link.bandwidth + copied


def shard(
    flow: Dataflow,
    blocks: Sequence[Block],
    axis: AxisCosts,
    rows: int,
    *,
    sequence: bool = False,
    alike: bool = True,
) -> Sharding:
    """Find the cheapest sharding of a graph over the ranks of an axis.

    Args:
        rows: rows of a micro-batch; they weigh the seconds of computing against those of sending.
        sequence: also consider shards of the sequence dim between the layers.
        alike: give all blocks of a class the same strategies.

    Raises:
        AutopipeError: there is no solution; that is a bug, since everything can be replicated.
    """
    model = Model(flow, axis.ranks)
    variables = Variables(model, blocks if alike else ())
    choices = choices_of(model, variables, sequence)
    costs = strategy_costs(model, variables, axis, rows, memory=sequence)
    return _solve(model, variables, choices, costs, axis, rows)


class Variables:
    """The variable of each node and state: one for all in the same place of a class of blocks."""

    def __init__(self, model: Model, blocks: Sequence[Block]) -> None:
        graph = model.graph
        self.nodes: dict[str, Hashable] = {node.name: node.name for node in graph.nodes}
        self.states: dict[str, Hashable] = {name: State(name) for name in graph.states}
        self.enough = set(self.nodes)
        """Nodes whose strategies are those of all of their class: of its first two members."""
        seen: Counter[Hashable] = Counter()
        for block in blocks:
            home = block.prefix
            nodes = graph.nodes[block.first : block.stop]
            read = [value for node in nodes for value in node.values()]
            # The first block may get no gradient of its input, or have a frozen weight; and it may
            # begin with a view of what was written in place before it.
            carrying = tuple(value in model.carrying for value in read)
            kind = block.kind, carrying, tuple(value in model.fixed for value in read)
            seen[kind] += 1
            for offset, node in enumerate(nodes):
                self.nodes[node.name] = (kind, offset)
                if seen[kind] > 2:
                    self.enough.discard(node.name)
                for value in node.values():
                    if isinstance(value, State) and value.name.startswith(home):
                        self.states[value.name] = (kind, value.name.removeprefix(home))

    def of(self, value: Value) -> Hashable:
        """The variable of the node or state that makes a value."""
        if isinstance(value, Ref):
            return self.nodes[value.node]
        return self.states[value.name] if isinstance(value, State) else value


Positional = tuple[tuple[Placement, ...], Placement]
"""A strategy without names: the placements of its inputs, in order, and of its output."""

Want = tuple[Hashable, int]
"""A variable, and the position of one of its inputs."""

_RESULTS = "the graph's results"

Costs = Callable[[Hashable, Positional], float]
"""Seconds of each strategy of a variable."""

Choices = dict[Hashable, dict[Positional, None]]
"""The strategies of each variable."""


def choices_of(model: Model, variables: Variables, sequence: bool) -> Choices:
    """The strategies of each variable; those of a state have no inputs."""
    graph, choices = model.graph, Choices()
    demanded = demands(model)
    shards: dict[Hashable, dict[Placement, None]] = defaultdict(dict)
    for name, state in graph.states.items():
        value = State(name)
        placements: list[Placement] = [I, R] if state.trainable else [I]
        if state.kind == "parameter" and value not in model.fixed:
            by_dim = [S(dim) for dim in range(len(state.spec.shape))]
            candidates = dict.fromkeys([*by_dim, *demanded.get(value, ())])
            placements += [p for p in candidates if model.can_shard(value, p)]
        variable = variables.of(value)
        choices.setdefault(variable, {}).update(dict.fromkeys(((), p) for p in placements))
        shards[variable] |= dict.fromkeys(p for p in placements if p.sharded)
    for path, spec in graph.inputs.items():
        leaf = Input(path)
        choices[leaf] = {((), I): None}
        if sequence and len(spec.shape) > 1 and model.can_shard(leaf, S(1)):
            shards[leaf] = {S(1): None}
    for node in graph.nodes:
        if node.name not in variables.enough:
            continue
        variable = variables.nodes[node.name]
        strategies_of = choices.setdefault(variable, {})
        for strategy in strategies(model, node, lambda value: shards[variables.of(value)]):
            strategies_of[tuple(strategy.inputs.values()), strategy.output] = None
            if strategy.output.sharded:
                shards[variable][strategy.output] = None
    return choices


Conversions = dict[tuple[Placement, Placement], int]
"""The variables of a value's conversions, by source and target placement."""


def _solve(
    model: Model, variables: Variables, choices: Choices, costs: Costs, axis: AxisCosts, rows: int
) -> Sharding:
    program = IntegerProgram()
    x = {
        variable: [program.variable(costs(variable, choice), whole=True) for choice in of_it]
        for variable, of_it in choices.items()
    }
    choices[_RESULTS], x[_RESULTS] = {((I,), I): None}, [program.variable(0.0)]
    for of_one in x.values():
        program.sums(of_one, [], 1, 1)
    _convert_once(program, model, variables, choices, x, axis, rows)
    values = program.solve()
    picked = {
        variable: max(zip(of_one, choices[variable], strict=True), key=lambda p: values[p[0]])[1]
        for variable, of_one in x.items()
    }
    states = {name: picked[variable][1] for name, variable in variables.states.items()}
    nodes = {name: picked[variable] for name, variable in variables.nodes.items()}
    return Sharding(
        axis.ranks,
        {name: placement for name, placement in states.items() if placement != I},
        {name: lie for name, lie in nodes.items() if {*lie[0], lie[1]} != {I}},
    )


def _convert_once(
    program: IntegerProgram,
    model: Model,
    variables: Variables,
    choices: Choices,
    x: dict[Hashable, list[int]],
    axis: AxisCosts,
    rows: int,
) -> None:
    """Add the conversions to a program: e for each reader of a value, z for all readers together.

    All readers that need one conversion of a value share its cost, in every block.
    """
    edges: dict[tuple[Hashable, Want], Conversions] = {}
    together: Counter[tuple[Hashable, tuple[Want, ...]]] = Counter()
    example: dict[Hashable, Value] = {}
    for value, wants in _users(model, variables).items():
        maker = variables.of(value), value.output if isinstance(value, Ref) else 0
        example.setdefault(maker, value)
        together[maker, tuple(wants)] += 1
        for want in wants:
            if (maker, want) not in edges:
                made = _by_placement(model, choices, x, maker[0], None, value)
                wanted = _by_placement(model, choices, x, *want, value)
                edges[maker, want] = _edge(program, made, wanted, value in model.carrying)
    for (made_by, consumers), count in together.items():
        converted: Conversions = {}
        for want in consumers:
            for (a, b), e in edges[made_by, want].items():
                if a == b:
                    continue
                if (a, b) not in converted:
                    seconds = _conversion(model, axis, example[made_by], rows, a, b)
                    converted[a, b] = program.variable(count * seconds)
                program.sums([converted[a, b]], [e], 0, 1)


def _by_placement(
    model: Model,
    choices: Choices,
    x: dict[Hashable, list[int]],
    variable: Hashable,
    position: int | None,
    value: Value,
) -> dict[Placement, list[int]]:
    """A variable's strategies by the placement of one input, or of the output."""
    found: dict[Placement, list[int]] = defaultdict(list)
    for number, (inputs, output) in enumerate(choices[variable]):
        placement = output if position is None else inputs[position]
        found[model.normal(value, placement)].append(x[variable][number])
    return found


def _edge(
    program: IntegerProgram,
    made: dict[Placement, list[int]],
    wanted: dict[Placement, list[int]],
    differentiable: bool,
) -> Conversions:
    """The variables e of one reader of a value, which sum to the strategies of both ends."""
    edge = {
        (a, b): program.variable(0.0)
        for a in made
        for b in wanted
        if moves(a, b, differentiable) is not None
    }
    for a, of_a in made.items():
        program.sums([e for (s, _), e in edge.items() if s == a], of_a, 0, 0)
    for b, of_b in wanted.items():
        program.sums([e for (_, t), e in edge.items() if t == b], of_b, 0, 0)
    return edge


def _users(model: Model, variables: Variables) -> dict[Value, dict[Want, None]]:
    """Who reads each value; the graph's results do, as they are."""
    users: dict[Value, dict[Want, None]] = defaultdict(dict)
    for node in model.graph.nodes:
        for position, value in enumerate(model.tensors(node)):
            users[value][variables.nodes[node.name], position] = None
    for value in dict.fromkeys(values_in(model.graph.outputs)):
        users[value][_RESULTS, 0] = None
    return users


def _conversion(
    model: Model, axis: AxisCosts, value: Value, rows: int, source: Placement, target: Placement
) -> float:
    """Seconds of a conversion of a value and of its gradient."""
    spec = model.graph.spec(value)
    size = bytes_at(spec, rows)
    strided = any(is_strided(shape_at(spec, rows), placement) for placement in (source, target))
    sent = moves(source, target, value in model.carrying) or ()
    # Of conversions that send nothing, rather fewer.
    least = 1e-4 * size / axis.link.bandwidth
    return least + sum(axis.seconds(move, size, strided=strided) for move in sent)


def is_strided(shape: Sequence[int], placement: Placement) -> bool:
    """Whether a rank's shard is in several pieces of the whole tensor's memory."""
    if not placement.sharded:
        return False
    return placement.segments != 1 or math.prod(shape[: placement.dim]) > 1


def strategy_costs(
    model: Model, variables: Variables, axis: AxisCosts, rows: int, *, memory: bool = False
) -> Costs:
    """The seconds of each strategy of a variable: a sum over all nodes or states that have it.

    Without `memory` only arithmetic counts: compilers fuse memory-bound ops, and sharding a norm is
    not worth more bytes or a second collective.
    """
    graph = model.graph
    computing: dict[Hashable, float] = defaultdict(float)
    bandwidth = axis.device.bandwidth if memory else math.inf
    device = replace(axis.device, launch=0.0, bandwidth=bandwidth)
    forward, backward = op_seconds.seconds(op_costs.costs(graph), rows, device)
    for node, each in zip(graph.nodes, forward + backward, strict=True):
        computing[variables.nodes[node.name]] += float(each)
    holding: dict[Hashable, float] = defaultdict(float)
    members: Counter[Hashable] = Counter()
    for name, state in graph.states.items():
        if state.kind == "parameter":
            holding[variables.of(State(name))] += bytes_at(state.spec, rows)
            members[variables.of(State(name))] += 1
    matrices = {variables.of(State(n)) for n, s in graph.states.items() if len(s.spec.shape) > 1}

    def seconds(variable: Hashable, choice: Positional) -> float:
        inputs, output = choice
        share = 1 / axis.ranks if any(p.sharded for p in (*inputs, output)) else 1.0
        if variable not in holding:
            return computing[variable] * share
        size = holding[variable]
        price = PRICE * size / axis.link.bandwidth * share if variable in matrices else 0.0
        # As if each micro-batch had the sum that a step has once: of equals, whole gradients win.
        count = members[variable]
        return price + (count * axis.seconds(ALL_REDUCE, size / count) if output == R else 0.0)

    return seconds
