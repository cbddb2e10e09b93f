"""Cut a graph into stages: the nodes, inputs, states and transfers of each, and the legal cuts.

    stage 0            stage 1            stage 2
    embed, block 0     block 1            block 2, loss
        | hidden ---------> | hidden ---------> |
        | skip ------------------------------> |      sent straight to the stage that needs it
      mask               mask'              mask''    recomputed from the batch: nothing sent

A stage runs a range of node positions. It skips the range's local nodes (see `ir.dataflow`) that it
does not need, and adds the local nodes from elsewhere that it needs.

A stage that several ranks of a pipeline hold stands once for each of them, one behind the other:
they take turns. Of n such ranks the i-th runs micro-batches i, i + n, i + 2n, ...
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from autopipe.errors import PlanError
from autopipe.ir import check
from autopipe.ir.dataflow import Dataflow, written_states
from autopipe.ir.graph import Graph, Input, Ref, State, Value, values_in


@dataclass(frozen=True)
class Stage:
    """One stage of a partition.

    Attributes:
        first, stop: its range [first, stop) of node positions.
        nodes: the positions that it runs, in order, local nodes from elsewhere included.
        inputs: paths of the batch's leaves that it reads.
        states: names of the parameters, buffers and constants that it reads.
        receives: tensors from earlier stages, each with the index of the stage that makes it. Of
            stages that take turns each is named.
        sends: tensors for later stages, each with the index of the stage that needs it.
        copied: received tensors that the stage writes in place.
    """

    index: int
    first: int
    stop: int
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    states: tuple[str, ...]
    receives: tuple[tuple[Ref, int], ...]
    sends: tuple[tuple[Ref, int], ...]
    copied: frozenset[Ref]

    @property
    def incoming(self) -> tuple[Ref, ...]:
        """The tensors that it receives, each once, in the order of `receives`."""
        return tuple(dict.fromkeys(value for value, _ in self.receives))

    @property
    def outgoing(self) -> tuple[Ref, ...]:
        """The tensors that it sends, each once, in the order of `sends`."""
        return tuple(dict.fromkeys(value for value, _ in self.sends))

    def is_last(self, graph: Graph) -> bool:
        """Whether it makes the graph's outputs."""
        return self.stop == len(graph.nodes)


def legal_cuts(flow: Dataflow) -> tuple[int, ...]:
    """Positions before which the graph may be cut, ascending.

    A cut is before a node that is not local. It must not separate nodes that use a buffer or input
    if one of them writes it. If a storage is written later, a cut must not send two of its aliases,
    nor one that is read after the write: a third stage would receive the old value. A parameter
    that forward masks is where its mask is.
    """
    nodes = flow.graph.nodes
    legal = [position > 0 and not local for position, local in enumerate(flow.local)]
    for root, group in _written_groups(flow).items():
        spans = [_span(flow, value) for value in group]
        if not isinstance(root, Ref):
            touched = [p for _, last in spans for p in last] + list(flow.writers[root])
            for cut in range(min(touched) + 1, min(max(touched) + 1, len(nodes))):
                legal[cut] = False
            continue
        for cut in range(flow.position(root) + 1, flow.writers[root][-1] + 1):
            crossing = [used for made, used in spans if made < cut and used and used[-1] >= cut]
            next_write = next(writer for writer in flow.writers[root] if writer >= cut)
            if len(crossing) > 1 or any(used[-1] > next_write for used in crossing):
                legal[cut] = False
    for masked in _masked_groups(flow):
        used = sorted(position for value in masked for position in flow.users.get(value, ()))
        for cut in range(used[0] + 1, used[-1] + 1) if used else ():
            legal[cut] = False
    assert len(legal) == len(nodes)
    return tuple(position for position, fine in enumerate(legal) if fine)


def _masked_groups(flow: Dataflow) -> Iterator[list[Value]]:
    """Each parameter that forward changes by buffers, and these (`StateSpec.projection`)."""
    for name, state in flow.graph.states.items():
        _, given = state.projection or ("", ())
        if buffers := [value for value in given if isinstance(value, State)]:
            yield [State(name), *buffers]


def _written_groups(flow: Dataflow) -> dict[Value, list[Value]]:
    """The values of each storage that a node writes and that is not local."""
    groups: dict[Value, list[Value]] = defaultdict(list)
    for value, root in flow.root.items():
        local = isinstance(root, Ref) and flow.local[flow.position(root)]
        if root in flow.writers and not local:
            groups[root].append(value)
    return groups


def _span(flow: Dataflow, value: Value) -> tuple[int, tuple[int, ...]]:
    """The position at which a value is made, and those at which it is read."""
    return flow.position(value), flow.users.get(value, ())


def partition(flow: Dataflow, cuts: Sequence[int]) -> tuple[Stage, ...]:
    """Cut a graph before the node positions `cuts`, ascending, into `len(cuts) + 1` stages.

    Raises:
        PlanError: a cut is not legal; the message names the node.
    """
    graph = flow.graph
    legal = set(legal_cuts(flow))
    for cut in cuts:
        if cut not in legal:
            raise PlanError(
                f"the graph cannot be cut before {graph.nodes[cut].name!r}: "
                + (
                    "it depends on the batch alone and is made again in every stage"
                    if flow.local[cut]
                    else "two sides of the cut would share a tensor that is written in place"
                ),
                hint="cut at another node; `autopipe trace` lists them",
            )
    bounds = [0, *cuts, len(graph.nodes)]
    if sorted(set(bounds)) != bounds:
        raise PlanError(f"cuts must ascend and leave no stage empty, found {list(cuts)}")
    needed = [_needed(flow, bounds, index) for index in range(len(bounds) - 1)]
    received = [received for _, received in needed]
    stages = []
    for index, (positions, arrivals) in enumerate(needed):
        # In the graph's order: stages that do the same list their inputs and states alike.
        nodes = tuple(sorted(positions))
        reads = [v for p in nodes for v in graph.nodes[p].values()]
        if index == len(needed) - 1:
            reads += values_in(graph.outputs)
        sends = [
            (value, target)
            for target in range(index + 1, len(needed))
            for value, source in received[target]
            if source == index
        ]
        copied = frozenset(
            value
            for value, _ in arrivals
            if any(w in positions for w in flow.writers.get(flow.root[value], ()))
        )
        stages.append(
            Stage(
                index=index,
                first=bounds[index],
                stop=bounds[index + 1],
                nodes=nodes,
                inputs=tuple(dict.fromkeys(v.path for v in reads if isinstance(v, Input))),
                states=tuple(dict.fromkeys(v.name for v in reads if isinstance(v, State))),
                receives=tuple(arrivals),
                sends=tuple(sends),
                copied=copied,
            )
        )
    check.refuse("partition", broken(graph, stages))
    return tuple(stages)


def _needed(
    flow: Dataflow, bounds: Sequence[int], index: int
) -> tuple[set[int], list[tuple[Ref, int]]]:
    """The nodes of stage `index`, and its received tensors, each with the stage that makes it."""
    graph = flow.graph
    first, stop = bounds[index], bounds[index + 1]
    pending = [p for p in range(first, stop) if not flow.local[p]]
    outputs: list[Value] = []
    if index == len(bounds) - 2:
        outputs = list(values_in(graph.outputs))
    positions: set[int] = set()
    received: dict[Ref, int] = {}

    def need(value: Value) -> None:
        if not isinstance(value, Ref):
            return
        maker = flow.position(value)
        if flow.local[maker]:
            pending.append(maker)
        elif maker < first:
            received[value] = bisect_right(bounds, maker) - 1

    for value in outputs:
        need(value)
    while pending:
        position = pending.pop()
        if position in positions:
            continue
        positions.add(position)
        for value in graph.nodes[position].values():
            need(value)
        pending += [writer for writer in flow.before[position] if flow.local[writer]]
    # The earliest maker first: the order in which both sides count a channel's tensors.
    order = sorted(received.items(), key=lambda item: (flow.position(item[0]), item[0].output))
    return positions, order


def in_turns(stages: Sequence[Stage], turns: Sequence[int]) -> tuple[Stage, ...]:
    """The stages of a partition, each as often as ranks of a pipeline take turns at it.

    Two of them exchange tensors if there is a micro-batch that both run.

    Args:
        turns: of each stage the number of ranks; nothing: one each.
    """
    if not turns:
        return tuple(stages)
    firsts = [0, *accumulate(turns)]

    def partners(rank: int, ranks: int, other: int) -> list[int]:
        """The entries of stage `other` that share a micro-batch with the rank-th of `ranks`."""
        divisor = math.gcd(ranks, turns[other])
        return [firsts[other] + i for i in range(turns[other]) if (i - rank) % divisor == 0]

    return tuple(
        replace(
            stage,
            index=firsts[stage.index] + rank,
            receives=tuple((ref, i) for ref, s in stage.receives for i in partners(rank, ranks, s)),
            sends=tuple((ref, i) for ref, s in stage.sends for i in partners(rank, ranks, s)),
        )
        for stage, ranks in zip(stages, turns, strict=True)
        for rank in range(ranks)
    )


def check_turns(graph: Graph) -> None:
    """Refuse that ranks take turns at stages of a graph whose forward writes what it keeps.

    Raises:
        PlanError: names what is written, and where.
    """
    for name, node in written_states(graph).items():
        raise PlanError(
            f"forward writes {name!r} (at {node.place}), and of ranks that take turns at a stage "
            "each would write its own",
            hint="leave out turns: a stage on one rank, and replicas of the pipeline, do",
        )


def owners(stages: Sequence[Stage], names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """For each state of `names`, the indices of the stages that read it, ascending.

    The gradients of a trainable parameter in several stages are summed over them.
    """
    found: dict[str, list[int]] = {name: [] for name in names}
    for stage in stages:
        for name in stage.states:
            if name in found:
                found[name].append(stage.index)
    return {name: tuple(indices) for name, indices in found.items()}


def broken(graph: Graph, stages: Sequence[Stage]) -> check.Findings:
    """Yield broken rules of stages: every node must run, and every value read must be present."""
    run = {position for stage in stages for position in stage.nodes}
    if len(run) < len(graph.nodes):
        missing = graph.nodes[min(set(range(len(graph.nodes))) - run)]
        yield f"no stage runs node {missing.name!r}", missing.place
    for stage in stages:
        subject = f"stage {stage.index}"
        for name in stage.states:
            if name not in graph.states:
                yield f"{subject} has {name!r}, which is no state", ""
        for path in stage.inputs:
            if path not in graph.inputs:
                yield f"{subject} has {path!r}, which is no input", ""
        for ref, source in stage.receives:
            if (ref, stage.index) not in stages[source].sends:
                yield f"{subject} receives {ref}, which stage {source} does not send it", ""
        for ref, target in stage.sends:
            if (ref, stage.index) not in stages[target].receives:
                yield f"{subject} sends {ref}, which stage {target} does not receive", ""
        at_hand: set[Value] = {value for value, _ in stage.receives}
        at_hand |= {State(name) for name in stage.states}
        at_hand |= {Input(path) for path in stage.inputs}
        for node in (graph.nodes[position] for position in stage.nodes):
            for value in node.values():
                if value not in at_hand:
                    yield f"{subject} runs node {node.name!r} without {value}", node.place
            at_hand.update(Ref(node.name, number) for number in range(len(node.outputs)))
