"""Piper's problems (Tarnawski, Narayanan, Phanishayee, NeurIPS 2021): its files and its formulas.

A problem is a directed graph of layers. Each layer comes in variants, by tensor-parallel degree t
and with or without recomputation (the paper's TMPCs, section 3). A plan cuts the graph into stages,
each with its own data-parallel degree d and a t of its own. With `bw` bytes a second:

    time of a stage    ( sum of p  +  2 sum over edges that enter or leave of (c + s) / bw ) / d
                       +  4 (d - 1) / d * sum of w / (N * bw)
    memory of a stage  sum over its layers of  a * y + b,  at most M
    y                  ceil( (d of this stage and of all after it, summed) / d )
    objective          the largest stage's time; devices: sum of d * t; d divides N

p, w, a, b and s are the variant's seconds, parameter bytes, bytes per micro-batch in flight, bytes
besides, and synchronisation bytes at an edge's end; c is the edge's bytes, N the micro-batches of a
batch. The 4 stands for an all-reduce by parameter server, as in PipeDream. Their program
(github.com/msr-fiddle/piper, algo.cpp, `getTPSForResult`) computes the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VANILLA = "vanilla"
RECOMPUTED = "activation recomp"


@dataclass(frozen=True)
class Variant:
    """One way to run a layer.

    Attributes:
        seconds: forward and backward of one micro-batch on its t devices together.
        parameters: bytes of weights per device, as the gradients' all-reduce counts them.
        in_flight: bytes per micro-batch in flight.
        fixed: bytes besides.
        entering: bytes of synchronisation at the edge from each predecessor, by its name.
        leaving: the same at the edge to each successor.
    """

    seconds: float
    parameters: float
    in_flight: float
    fixed: float
    entering: Mapping[int, float]
    leaving: Mapping[int, float]


@dataclass(frozen=True)
class Layer:
    """A node of the graph; `variants[t, recomputed]` of the degrees that it can run under."""

    name: int
    variants: Mapping[tuple[int, bool], Variant]


@dataclass(frozen=True)
class Graph:
    """Layers in a topological order, and the bytes of each edge by (source, destination)."""

    layers: tuple[Layer, ...]
    edges: Mapping[tuple[int, int], float]

    def degrees(self) -> list[int]:
        """Tensor-parallel degrees that every layer can run under, ascending."""
        common = set.intersection(*({t for t, _ in layer.variants} for layer in self.layers))
        return sorted(common)


@dataclass(frozen=True)
class Conditions:
    """What to plan a graph for: devices, bytes of each, micro-batches a batch, bytes a second."""

    devices: int
    memory: float
    micro_batches: int
    bandwidth: float


@dataclass(frozen=True)
class Stage:
    """Layers by name, the degrees, and which of the layers are recomputed."""

    layers: frozenset[int]
    dp: int
    tp: int
    recomputed: frozenset[int]


@dataclass(frozen=True)
class Score:
    """Seconds and bytes per stage, in the stages' order."""

    seconds: tuple[float, ...]
    memory: tuple[float, ...]

    @property
    def objective(self) -> float:
        """Seconds a micro-batch at the slowest stage."""
        return max(self.seconds)


def read(path: Path) -> Graph:
    """The graph in a file of Piper's `inputs` folder."""
    raw = json.loads(path.read_text())
    edges = {
        (edge["sourceId"], edge["destId"]): float(edge["communicationCost"])
        for edge in raw["edges"]
    }
    by_name = {node["id"]: _layer(node) for node in raw["nodes"]}
    return Graph(tuple(by_name[name] for name in _topological(list(by_name), edges)), edges)


def _layer(node: Mapping[str, Any]) -> Layer:
    variants = {}
    for degree, choices in node["TMPCs"].items():
        for choice in choices:
            variants[int(degree), {VANILLA: False, RECOMPUTED: True}[choice["id"]]] = Variant(
                choice["timePerSample"],
                choice["parameterSize"],
                choice["memoryUsageA"],
                choice["memoryUsageB"],
                {int(name): bytes_ for name, bytes_ in choice["syncTimeFw"].items()},
                {int(name): bytes_ for name, bytes_ in choice["syncTimeBw"].items()},
            )
    return Layer(node["id"], variants)


def _topological(names: Sequence[int], edges: Mapping[tuple[int, int], float]) -> list[int]:
    """Kahn's order: of the layers that are ready the one named first."""
    waiting = {name: sum(destination == name for _, destination in edges) for name in names}
    order: list[int] = []
    while waiting:
        name = next(name for name, left in waiting.items() if not left)
        del waiting[name]
        order.append(name)
        for source, destination in edges:
            if source == name:
                waiting[destination] -= 1
    return order


def time(
    graph: Graph,
    conditions: Conditions,
    stage: frozenset[int],
    layer: Layer,
    variant: Variant,
    dp: int,
) -> float:
    """Seconds that `layer` as `variant` adds to a stage of those layers and `dp` replicas."""
    crossing = 0.0
    for (source, destination), size in graph.edges.items():
        if destination == layer.name and source not in stage:
            crossing += 2 * (size + variant.entering[source])
        if source == layer.name and destination not in stage:
            crossing += 2 * (size + variant.leaving[destination])
    reduced = 4 * (dp - 1) * variant.parameters / dp / conditions.micro_batches
    return variant.seconds / dp + (crossing / dp + reduced) / conditions.bandwidth


def score(graph: Graph, conditions: Conditions, stages: Sequence[Stage]) -> Score:
    """Seconds and bytes of each stage.

    Raises:
        ValueError: the stages are no plan for the graph and the devices: a layer in none or in two
            of them, an edge that goes back, too many devices, or a degree that does not divide the
            micro-batches. Memory may be exceeded: the score says by how much.
    """
    home = {name: index for index, stage in enumerate(stages) for name in stage.layers}
    if sum(len(stage.layers) for stage in stages) != len(home) or len(home) != len(graph.layers):
        raise ValueError("each layer must be in one stage")
    if any(home[source] > home[destination] for source, destination in graph.edges):
        raise ValueError("an edge leads to an earlier stage")
    if sum(stage.dp * stage.tp for stage in stages) > conditions.devices:
        raise ValueError(f"more than {conditions.devices} devices")
    if any(conditions.micro_batches % stage.dp for stage in stages):
        raise ValueError(f"a data-parallel degree does not divide {conditions.micro_batches}")
    seconds, memory = [], []
    for index, stage in enumerate(stages):
        behind = sum(later.dp for later in stages[index:])
        flights = -(-behind // stage.dp)
        used = spent = 0.0
        for layer in graph.layers:
            if layer.name in stage.layers:
                variant = layer.variants[stage.tp, layer.name in stage.recomputed]
                used += variant.in_flight * flights + variant.fixed
                spent += time(graph, conditions, stage.layers, layer, variant, stage.dp)
        seconds.append(spent)
        memory.append(used)
    return Score(tuple(seconds), tuple(memory))
