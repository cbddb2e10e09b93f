"""Find where a model makes a row depend on the other rows of its batch, before its loss begins.

    h - h.mean(0)      of 4 rows one mean; of two micro-batches of 2 rows two means
    batch_norm(h)      in training: the same with mean and variance

Each micro-batch is computed by itself then, as in one process that accumulates gradients. That is
what people mean with batch norm, and may be no more than an oversight elsewhere, so it is said.

A graph is run on a few rows and on their halves (`row_runs`), with made-up weights. Where values
that enter the loss differ, the first node whose rows do is named. A model that sorts rows and puts
them back has rows that agree at the end, and is not named; nor is one that puts them back behind
its last parameters, as a mixture of experts without a head does:

    h[order] --experts--> rows in the order of their experts  |  [order.argsort()] --> loss
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopipe.batch.cut import slice_rows
from autopipe.batch.tree import flatten
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import Dataflow, analyse, is_random
from autopipe.ir.graph import (
    READ_OP,
    REGION_OP,
    Graph,
    Node,
    Ref,
    TensorSpec,
    arguments,
    at_batch,
    bytes_at,
)
from autopipe.ir.op_costs import costs
from autopipe.ir.repeats import shorten
from autopipe.rows.loss_tail import loss_nodes
from autopipe.rows.row_dims import RowsUnknown, rows_in
from autopipe.rows.row_runs import HALF, ROWS, Leaves, Make, Ran, RowRuns, off
from autopipe.tracing.traced import Trace

MOST_FLOPS = 1e10
"""Operations of a forward on these rows, of many equal blocks three: about a second's work."""

MOST_BYTES = 2**28
"""Limit on the bytes of parameters and buffers, and on those of all that a run makes."""

CLOSE = 1e-4
"""Tolerance, as a share of the largest entry: a call that runs as it is gives 32 bits."""

EXACT = 1e-6
"""Tolerance for a loss in float64."""

DRAWS = 4
"""Draws of weights: four rows may stay in their order by chance, or their means may agree."""


def remark(traced: Trace, example: Callable[[int], Any]) -> str | None:
    """A line for the user that names what mixes rows; None: nothing does, or it was not tried.

    Args:
        example: makes a batch of the given number of rows.
    """
    found = _batch_norm(traced.graph) or _mixing(traced, example)
    if found is None:
        return None
    return (
        f"{found.place}: {_name(found)} makes a row depend on the other rows of its micro-batch: "
        "each micro-batch is computed by itself, as where one process accumulates gradients; "
        "--micro-batches 1 --dp 1 leaves the batch whole"
    )


def _name(node: Node) -> str:
    return str(node.args[-1]) if node.op == REGION_OP else f"{node.short}()"


def _batch_norm(graph: Graph) -> Node | None:
    """The first batch norm in training, which needs no run to be found."""
    for node in graph.nodes:
        if node.op == "aten.batch_norm.default" and arguments(node)["training"]:
            return node
    return None


def puts_rows_back(traced: Trace, example: Callable[[int], Any]) -> bool:
    """Whether rows that enter the loss are in an order of the model's own, and the loss in none.

    Args:
        example: makes a batch of the given number of rows.
    """
    whole = _whole(traced, example)
    if whole is None:
        return False
    found = (_tried(whole, seed) for seed in range(DRAWS))  # some draw leaves rows where they are
    tried = next((tried for tried in found if tried and tried.differing), None)
    return tried is not None and _loss_adds_up(whole, tried.made_up)


def _mixing(traced: Trace, example: Callable[[int], Any]) -> Node | None:
    """The first node whose rows differ, if values that enter the loss do."""
    whole = _whole(traced, example)
    tried = whole and _tried(whole)
    if not (whole and tried and tried.differing) or _loss_adds_up(whole, tried.made_up):
        return None
    ancestors = (whole.flow.graph.nodes[p] for p in whole.before(tried.differing))
    return next((node for node in ancestors if _rows_differ(node, tried.runs)), None)


@dataclass(frozen=True)
class _Whole:
    """A graph, its equal blocks three, and what it is run on.

    Attributes:
        ends: the positions of the nodes whose values enter the loss.
        leaves: the rows of a batch.
        halves: those of its halves.
    """

    flow: Dataflow
    ends: frozenset[int]
    leaves: Leaves
    halves: Sequence[Leaves]

    def before(self, positions: Collection[int]) -> list[int]:
        """These nodes, and all that they come from."""
        return sorted(self.flow.with_all_before(positions))


def _whole(traced: Trace, example: Callable[[int], Any]) -> _Whole | None:
    """None of a graph that is too large to be run, or is traced for a number of rows."""
    graph = traced.graph
    states = sum(bytes_at(state.spec, ROWS) for state in graph.states.values())
    if traced.rows is not None or states > MOST_BYTES:
        return None
    flow = analyse(shorten(analyse(graph), find_blocks(graph)).graph)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        leaves = flatten(example(ROWS))
    halves = [slice_rows(traced.inputs, leaves, n, n + HALF) for n in (0, HALF)]
    whole = _Whole(flow, loss_nodes(flow).last, leaves, halves)
    return None if _large(_part(flow, whole.before(whole.ends))) else whole


class _Tried(NamedTuple):
    """Runs up to the ends, what their weights are made up by, and the ends whose rows differ."""

    made_up: Make
    runs: tuple[Ran, Ran, Ran]
    differing: frozenset[int]


def _tried(whole: _Whole, seed: int = 0) -> _Tried | None:
    """None of a graph that is not defined on made-up weights."""
    nodes = whole.flow.graph.nodes
    part = _part(whole.flow, whole.before(whole.ends))
    for made_up in (_around_zero, _positive):  # not every graph is defined on any number
        try:
            runs = part.runs(whole.leaves, whole.halves, made_up, seed=seed, outputs=False)
        except Exception:  # whatever the ops raise on numbers that the model never has
            continue
        if all(_finite(nodes[p], runs[0]) for p in whole.ends):
            differing = (p for p in whole.ends if _rows_differ(nodes[p], runs, end=True))
            return _Tried(made_up, runs, frozenset(differing))
    return None


def _loss_adds_up(whole: _Whole, made_up: Make) -> bool:
    """Whether the loss of all rows is the mean of the halves'; a sum and a count are their sums."""
    outputs = whole.flow.graph.outputs
    share = 0.5 if len(outputs) == 1 else 1.0
    part = _part(whole.flow, range(len(whole.flow.graph.nodes)))
    try:
        draws = [part.runs(whole.leaves, whole.halves, made_up, seed=n) for n in range(DRAWS)]
    except Exception:  # whatever the ops raise on numbers that the model never has
        return False
    return all(
        math.isclose(loss, share * (first + second), rel_tol=EXACT)
        for runs in draws
        for loss, first, second in zip(*(ran.outputs for ran in runs), strict=True)
    )


def _part(flow: Dataflow, positions: Collection[int]) -> RowRuns:
    """The nodes at these positions; what draws random numbers, but for a dropout, is made up."""
    nodes = [flow.graph.nodes[p] for p in positions if flow.graph.nodes[p].op != READ_OP]
    random = [node.name for node in nodes if is_random(node) and "dropout" not in node.op]
    return RowRuns(flow.graph, tuple(nodes), frozenset(random))


def _large(part: RowRuns) -> bool:
    flops = sum(float(at_batch(cost.forward_flops, ROWS)) for cost in costs(part.graph))
    return flops > MOST_FLOPS or sum(map(part.bytes, part.nodes)) > MOST_BYTES


def _around_zero(shape: tuple[int, ...], **options: Any) -> Tensor:
    """Values whose products have about the size of what they are multiplied with."""
    drawn: Tensor = torch.randn(shape, **options)
    return drawn / math.sqrt(_fan_in(shape))


def _positive(shape: tuple[int, ...], **options: Any) -> Tensor:
    drawn: Tensor = torch.rand(shape, **options)
    return drawn * 2 / _fan_in(shape)


def _fan_in(shape: tuple[int, ...]) -> int:
    return max(1, torch.Size(shape[1:]).numel())


def _finite(node: Node, ran: Ran) -> bool:
    results = (ran.values.get(Ref(node.name, n)) for n in range(len(node.outputs)))
    return all(bool(t.isfinite().all()) for t in results if isinstance(t, Tensor))


def _rows_differ(node: Node, runs: tuple[Ran, Ran, Ran], end: bool = False) -> bool:
    """Whether a result of a node has other rows in the halves than in the whole.

    Args:
        end: it enters the loss, to which a mean or a sum over the rows of halves adds up.
    """
    for number, spec in enumerate(node.outputs):
        ref = Ref(node.name, number)
        if spec is None or ref not in runs[0].values:
            continue
        whole, *halves = (ran.values[ref] for ran in runs)
        if _differ(spec, whole, *halves) and not (end and _adds_up(whole, *halves)):
            return True
    return False


def _adds_up(whole: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether a value without rows is the sum of the halves', or their mean."""
    if not whole.shape == first.shape == second.shape:
        return False
    sums = first + second
    return not (off(whole, sums, CLOSE) and off(whole, sums / 2, CLOSE))


def _differ(spec: TensorSpec, whole: Tensor, *halves: Tensor) -> bool:
    """False too where rows cannot be told apart."""
    try:
        return all(
            any(
                off(rows_in(whole, spec, (ROWS, first, HALF), minor), half, CLOSE)
                for first, half in zip((0, HALF), halves, strict=True)
            )
            for minor in (False, True)
        )
    except RowsUnknown:
        return False
