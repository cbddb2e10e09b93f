"""Find the segments in which a fused weight (such as q, k, v in one) can be sharded.

    c_attn.weight [h, 3h]      S(1, 3)   <- addmm [b, s, 3h]   S(2, 3)   <- split into q, k, v

A weight can be sharded in any number of segments; the useful number depends on the op that splits
the result. So demands are passed back from each such op to the weight.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from autopipe.ir.graph import Ref, Value
from autopipe.ir.op_costs import GROUPED
from autopipe.planfile.placements import Placement, S, through_view
from autopipe.sharding.op import Model, Op
from autopipe.sharding.rules_compute import operands
from autopipe.sharding.rules_layout import (
    bounds,
    permutation,
    permute,
    pieces,
    slice_,
    split,
    view,
)
from autopipe.sharding.strategies import RULES, is_pointwise

MOST = 8
"""The largest number of equal matrices in a fused weight, where a view separates them.
"""


def demands(model: Model) -> dict[Value, tuple[Placement, ...]]:
    """For each value, the placements that its direct and indirect readers demand."""
    demanded: dict[Value, dict[Placement, None]] = defaultdict(dict)
    cuts = _cuts(model)
    for node in reversed(model.graph.nodes):
        op = Op(model, node, lambda value: ())
        if not op.inputs or not op.outputs:
            continue
        x = op.inputs[0]
        of_result = list(demanded[op.outputs[0]])
        rule = RULES.get(op.name)
        if rule is split:
            dim = op.dim(of=x)
            demanded[x][S(dim, pieces(op, dim))] = None
        elif rule is slice_:
            dim = op.dim(of=x)
            if len(cuts[x, dim]) > 2:
                lengths = tuple(b - a for a, b in pairwise(sorted(cuts[x, dim])))
                demanded[x][S(dim, lengths)] = None
        elif rule is view:
            for placement in of_result:
                _add(model, demanded, op, placement)
            for dim in range(1, len(op.made)):
                _add(model, demanded, op, S(dim), of_fused=True)
        elif rule is permute:
            order = permutation(op)
            for placement in of_result:
                demanded[x][S(order[placement.dim], placement.segments)] = None
        elif op.name in ("linear", "addmm", "mm", "matmul", *GROUPED):
            _of_weight(op, of_result, demanded)
        elif is_pointwise(node):
            for placement in of_result:
                for value in op.inputs:
                    aligned = op.aligned(value, placement.dim)
                    if aligned is not None:
                        demanded[value][S(aligned, placement.segments)] = None
    return {value: tuple(placements) for value, placements in demanded.items()}


def _cuts(model: Model) -> dict[tuple[Value, int], set[int]]:
    """The bounds of all slices of a value, by dim."""
    found: dict[tuple[Value, int], set[int]] = defaultdict(set)
    for node in model.graph.nodes:
        if node.op == "aten.slice.Tensor" and Ref(node.name) in model.carrying:
            op = Op(model, node, lambda value: ())
            x = op.inputs[0]
            dim = op.dim(of=x)
            found[x, dim] |= {0, *bounds(op, x, dim), op.shape(x)[dim]}
    return found


def _add(
    model: Model,
    found: dict[Value, dict[Placement, None]],
    op: Op,
    placement: Placement,
    *,
    of_fused: bool = False,
) -> None:
    x = op.inputs[0]
    before = through_view(op.made, op.shape(x), placement.dim, placement.segments, model.ranks)
    if before is not None:
        few = isinstance(before.segments, int) and 1 < before.segments <= MOST
        if few or not of_fused:
            found[x][before] = None


def _of_weight(
    op: Op, of_result: list[Placement], demanded: dict[Value, dict[Placement, None]]
) -> None:
    """The last dim of a product is the weight's; a bias has that dim only."""
    if op.name in ("linear", "addmm"):
        names = ("weight", "bias") if op.name == "linear" else ("mat2", "self")
        w, bias = op[names[0]], op[names[1]]
    else:
        w, bias = operands(op)[1], None
    for placement in of_result:
        if placement.dim == len(op.made) - 1:
            outer = 0 if op.name == "linear" else len(op.shape(w)) - 1
            demanded[w][S(outer, placement.segments)] = None
            if bias is not None:
                demanded[bias][S(0, placement.segments)] = None
