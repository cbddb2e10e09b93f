"""List the sharding strategies of each op: the rule table of tensor parallelism.

A strategy gives the placements of an op's tensors when each rank runs it on its parts:

    linear    x: R             w: S(0)   b: S(0)    ->  S(-1)      column-parallel
              x: S(-1)         w: S(1)   b: P       ->  P          row-parallel
              x: S(d)          w: R      b: R       ->  S(d)       shards of the rows
    mul       a: P             b: R                 ->  P
    sum       x: S(d), summed over d                ->  P

(The first two are Megatron-LM's, arXiv:1909.08053, section 3.) Every op has two strategies more:
all I, and all R. An op that is not in the table has those only: it is replicated, never wrong.
What runs a user's own backward has the first alone (`_OWN_BACKWARD`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from autopipe.errors import PlanError
from autopipe.ir.dataflow import Dataflow
from autopipe.ir.graph import READ_OP, REGION_OP, Node, State, Value, resolve
from autopipe.ir.opaque_ops import COND_OP, FUNCTION_OP
from autopipe.planfile.placements import I, P, Placement, R, S, Sharding, moves
from autopipe.sharding.op import Model, Op, Rule, Shards, Strategy
from autopipe.sharding.rules_compute import LAYERS
from autopipe.sharding.rules_layout import SHAPES

_OWN_BACKWARD = frozenset((FUNCTION_OP, REGION_OP, COND_OP))
"""Ops with backwards that users write: Functions of autograd, hooks on gradients. They may clamp a
gradient, normalise it, or add a penalty to it, as L2Wrap of RWKV does. Of a partial sum, which is
what a rank has of a gradient under R, that is something else: they get the whole one."""

RULES: dict[str, Rule] = SHAPES | LAYERS
"""The rule of each op. `strategies` adds the replicated strategies and those of pointwise ops."""


def strategies(model: Model, node: Node, shards: Shards) -> tuple[Strategy, ...]:
    """All possible strategies of a node, the replicated ones first, each once."""
    op = Op(model, node, shards)
    candidates = [Strategy(dict.fromkeys(op.inputs, I), I)]
    # A conversion makes a new tensor, which a write in place does not reach.
    fixed = {value for value in (*op.inputs, *op.outputs) if value in model.fixed}
    if op.carries and not fixed and node.op not in _OWN_BACKWARD:
        candidates.append(Strategy({v: op.free(v) for v in op.inputs}, R))
    if op.outputs and node.op != READ_OP and fixed.isdisjoint(op.outputs):
        rule = RULES.get(op.name) or (pointwise if is_pointwise(node) else None)
        candidates += rule(op) if rule is not None else ()
    possible: dict[tuple[tuple[Placement, ...], Placement], Strategy] = {}
    for inputs, output in candidates:
        placements = {value: inputs.get(value, op.free(value)) for value in op.inputs}
        placed = [*placements.items(), *((output_value, output) for output_value in op.outputs)]
        stays = all(placements[value] == I for value in fixed.intersection(placements))
        if stays and all(model.can_shard(v, p) for v, p in placed if p.sharded):
            possible.setdefault((tuple(placements.values()), output), Strategy(placements, output))
    return tuple(possible.values())


def possible_in(flow: Dataflow, sharding: Sharding) -> Sharding:
    """A sharding that was made for another graph of the model, without the nodes that have no such
    strategy in this one.

    Of a table of 24 positions `table[:24]` keeps a shard, and `table[:12]` of shorter rows does
    not; in evaluation a node of this name may be another one.
    """
    model = Model(flow, sharding.ranks, least=1)
    found = {
        node.name: known
        for node in flow.graph.nodes
        if (known := sharding.nodes.get(node.name)) and _allows(model, node, *known)
    }
    return replace(sharding, nodes=found)


def check_possible(flow: Dataflow, sharding: Sharding, length: int | None = None) -> None:
    """Refuse a sharding that somebody has written by hand, if ranks would compute something else.

    Args:
        flow: of the graph for which it was written.
        length: as of `Model`.

    Raises:
        PlanError: names a parameter or a node, and its placements that no rule has.
    """
    model = Model(flow, sharding.ranks, length)
    made: dict[Value, Placement] = {}
    for name in flow.graph.states:
        state, placement = State(name), sharding.states.get(name, I)
        if not _holds(model, state, placement):
            raise _no_strategy(name, (), placement)
        made[state] = model.normal(state, placement)
    for node in flow.graph.nodes:
        inputs, output = sharding.nodes.get(node.name, ((), I))
        if node.name in sharding.nodes and not _allows(model, node, inputs, output, exactly=True):
            raise _no_strategy(node.name, inputs, output)
        values = model.tensors(node)
        for value, wanted in zip(values, inputs or (I,) * len(values), strict=True):
            source, target = made.get(value, I), model.normal(value, wanted)
            if moves(source, target, value in model.carrying) is None:
                raise _no_strategy(node.name, inputs, output)
        for result in Op(model, node, lambda value: ()).outputs:
            made[result] = model.normal(result, output)


def _holds(model: Model, state: State, placement: Placement) -> bool:
    """Whether ranks can hold a parameter, buffer or constant so."""
    if not placement.sharded:
        return placement != P
    if model.graph.states[state.name].kind != "parameter" or state in model.fixed:
        return False
    return placement.dim < len(model.shape(state)) and model.can_shard(state, placement)


def _no_strategy(name: str, inputs: Sequence[Placement], output: Placement) -> PlanError:
    lies = f"{', '.join(map(str, inputs))} -> {output}" if inputs else str(output)
    return PlanError(
        f"plan: {name!r} is to lie as {lies}, which no rule of tensor parallelism gives: ranks "
        "would compute something else",
        hint="take back that change in `states` of the plan, or make the plan again with "
        "`autopipe plan`",
    )


def _allows(
    model: Model,
    node: Node,
    inputs: Sequence[Placement],
    output: Placement,
    *,
    exactly: bool = False,
) -> bool:
    """Whether a node has a strategy with these placements.

    Args:
        exactly: gradients have to lie so, too.
    """
    if len(inputs) != len(model.tensors(node)):
        return False
    lie = dict(zip(model.tensors(node), inputs, strict=True))
    outputs: tuple[Value, ...] = Op(model, node, lambda value: ()).outputs
    made = dict.fromkeys(outputs, output)
    if any(p.sharded and p.dim >= len(model.shape(v)) for v, p in (*lie.items(), *made.items())):
        return False

    def alike(placements: Mapping[Value, Placement]) -> list[Placement]:
        return [model.normal(v, p) if exactly else _held(p) for v, p in placements.items()]

    every = strategies(model, node, lambda value: (lie[value],) if lie[value].sharded else ())
    wanted = alike(lie), alike(made)
    return any(
        (alike({v: one.inputs[v] for v in lie}), alike(dict.fromkeys(made, one.output))) == wanted
        for one in every
    )


def _held(placement: Placement) -> Placement:
    """The placement, but I in place of R, which differs in the gradient alone."""
    return I if placement == R else placement


# Element by element

_POINTWISE = frozenset(
    "to contiguous clone alias detach dropout where masked_fill zeros_like ones_like "
    "empty_like full_like lift_fresh_copy _to_copy bernoulli rsub silu relu6 hardswish".split()
)
"""Pointwise ops that torch does not tag as pointwise."""

_LINEAR = frozenset("to _to_copy contiguous clone alias neg".split())


def is_pointwise(node: Node) -> bool:
    """Whether an op computes each element of its result by itself."""
    op = resolve(node.op)
    return node.short in _POINTWISE or torch.Tag.pointwise in getattr(op, "tags", ())


def pointwise(op: Op) -> Iterator[Strategy]:
    """Shards of any dim; operands that are broadcast over it stay whole."""
    rank = len(op.made)
    wanted = {
        S(placement.dim + rank - len(op.shape(value)), placement.segments): None
        for value in op.inputs
        for placement in op.shards(value)
    }
    for target in wanted:
        dims = {value: op.aligned(value, target.dim) for value in op.inputs}
        shared = {v: S(d, target.segments) for v, d in dims.items() if d is not None}
        if shared and op.made[target.dim] > 1:
            yield Strategy(shared, target)
    if not op.carries:
        return
    first = op.node.args[0]
    carrying = [value for value in op.inputs if value in op.model.carrying]
    if op.name in _LINEAR and first in carrying:
        yield Strategy({first: P}, P)
    elif op.name in ("add", "sub") and len(op.inputs) == len(op.node.args):
        if all(_has_summands(op.model.graph.spec(value).dtype) for value in op.inputs):
            yield Strategy(dict.fromkeys(op.inputs, P), P)
    elif op.name in ("mul", "div") and op.arguments.get("rounding_mode") is None:
        a, b = op.node.args[:2]
        for scaled, by in ((a, b), (b, a))[: 1 if op.name == "div" else 2]:
            if scaled in carrying and scaled != by:
                yield Strategy({scaled: P}, P)


def _has_summands(dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype is a sum of parts of it: integers have no halves."""
    return dtype.is_floating_point or dtype.is_complex
