"""Seconds of the conversions by which stages send tensors in parts (`stages.sent_parts`).

    forward    the receivers gather, and copy what they gathered; the senders copy a part
    backward   the other way round; or, for partial sums, the receivers reduce-scatter

They follow from formulas like those of any node, and are added to a stage's other seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from autopipe.cluster.tp_groups import GroupKind
from autopipe.ir import op_costs, op_seconds
from autopipe.ir.graph import Graph, at_batch
from autopipe.ir.partition import Stage
from autopipe.planners.costs.plan_memory import CutModel
from autopipe.planners.costs.precision_of import computed_in
from autopipe.planners.costs.tp_degrees import Exchange, exchanges, move_seconds
from autopipe.planners.model.estimate import EXCHANGES, Estimate


class Conversions(NamedTuple):
    """A stage's conversions; entry i of each field is about conversion i."""

    costs: Sequence[op_costs.NodeCost]
    dtypes: Sequence[torch.dtype]
    exchanges: Sequence[Exchange]


NONE = Conversions((), (), ())
"""The conversions of a stage that sends and receives whole tensors."""


def conversions(
    graph: Graph, stages: Sequence[Stage], added: frozenset[str], ranks: int, precision: str
) -> list[Conversions]:
    """The conversions of each stage.

    Args:
        graph: the graph of one tensor-parallel rank.
        added: the names of the nodes that are such conversions.
    """
    costs, sent = op_costs.costs(graph), exchanges(graph, ranks, precision)
    dtypes = computed_in(graph, costs, precision)
    found = []
    for stage in stages:
        own = [p for p in stage.nodes if graph.nodes[p].name in added]
        found.append(
            Conversions([costs[p] for p in own], [dtypes[p] for p in own], [sent[p] for p in own])
        )
    return found


def with_conversions(
    estimate: Estimate, cut: CutModel, kinds: Sequence[GroupKind], forwards: int
) -> Estimate:
    """The estimate with the conversions' seconds added to those of its stages, as exchanges.

    Args:
        kinds: the kinds of tensor-parallel groups, by number.
        forwards: how often a step runs each micro-batch forward.
    """
    if cut.parted is None:
        return estimate
    own = conversions(cut.graph, cut.stages, cut.parted.added, cut.degree.tp, cut.precision)
    stages = []
    for stage, converted in zip(estimate.stages, own, strict=True):
        there, back = _seconds(converted, cut.rows, kinds[stage.kind], cut.degree.tp)
        there *= forwards
        stages.append(
            replace(
                stage,
                forward_seconds=stage.forward_seconds + there,
                backward_seconds=stage.backward_seconds + back,
                spent={**stage.spent, EXCHANGES: stage.spent[EXCHANGES] + there + back},
            )
        )
    return replace(estimate, stages=tuple(stages))


def _seconds(of: Conversions, rows: int, kind: GroupKind, ranks: int) -> tuple[float, float]:
    """Forward and backward seconds of the conversions of a micro-batch, by its rows."""
    assert kind.link is not None, "tensors go in parts between groups of several ranks"
    ways = op_seconds.seconds(of.costs, rows, kind.device, of.dtypes)
    there, back = (float(way.sum()) for way in ways)
    for moves, size in of.exchanges:
        whole = at_batch(size, rows)
        there += move_seconds(moves[0], whole, kind.link, ranks)
        back += move_seconds(moves[1], whole, kind.link, ranks)
    return there, back
