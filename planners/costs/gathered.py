"""Count the most bytes of a stage's parameters that ZeRO-3 has gathered at once."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autopipe.ir.graph import Graph, bytes_at
from autopipe.ir.opaque_ops import OPAQUE
from autopipe.planners.costs.stage_memory import share_of
from autopipe.stages.gathering import Stay, most_bytes, stays, units_of
from autopipe.stages.lower import Lowered
from autopipe.stages.precision import copy_bytes


def gathered_bytes(graph: Graph, lowered: Lowered, states: Mapping[str, Tensor], ranks: int) -> int:
    """The most bytes that are gathered at once in a forward or backward of a stage.

    For backward each gathered unit is assumed to be read, in the reversed order of forward.

    Args:
        lowered: the stage, over `states`.
        ranks: the number of ranks over which its parameters are sharded.
    """
    parameters = {n: t for n, t in states.items() if graph.states[n].kind == "parameter"}
    units = units_of(lowered.module, parameters)
    staying = stays(lowered.module, units, parameters)
    if any(graph.nodes[position].op in OPAQUE for position in lowered.stage.nodes):
        staying = [stay._replace(first=0, last=0) for stay in staying]  # no graph says where
    end = max((stay.last for stay in staying), default=0)
    back = sorted(Stay(end - stay.last, end - stay.first, stay.unit) for stay in staying)
    copied = {*lowered.low} - {n for n in parameters if graph.states[n].master is not None}
    whole, shares = [], []
    for unit in units:
        read = {name: bytes_at(graph.states[name].spec, 1) for name in unit}
        whole.append(
            sum(read.values()) + sum(copy_bytes(graph.states[n]) for n in unit if n in copied)
        )
        shares.append(sum(share_of(graph.states[n].spec.shape, read[n], ranks) for n in unit))
    return max(most_bytes(order, whole, shares, ranks) for order in (staying, back))
