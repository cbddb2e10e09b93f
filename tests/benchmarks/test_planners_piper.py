"""Piper's files and formulas, on problems small enough to work out by hand or to try in full."""

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planners import cases, exact, piper, piper_problem
from benchmarks.planners.__main__ import table
from benchmarks.planners.piper import Conditions, Graph, Layer, Stage, Variant


def variant(seconds: float, in_flight: float, fixed: float) -> dict[str, Any]:
    return {
        **{"id": piper.VANILLA, "timePerSample": seconds, "parameterSize": 4.0},
        **{"memoryUsageA": in_flight, "memoryUsageB": fixed, "syncTimeFw": {}, "syncTimeBw": {}},
    }


def test_pipers_file(tmp_path: Path) -> None:
    """Layer 7 feeds layer 3, which the file names first."""
    last, first = variant(2.0, 1.0, 5.0), variant(1.0, 8.0, 6.0)
    last["syncTimeFw"] = {"7": 3.0}
    first["syncTimeBw"] = {"3": 1.0}
    cheap = {**first, "id": piper.RECOMPUTED, "timePerSample": 1.5, "memoryUsageA": 2.0}
    nodes = [
        {"id": 3, "TMPCs": {"1": [last], "2": [last]}},
        {"id": 7, "TMPCs": {"1": [first, cheap]}},
    ]
    edges = [{"sourceId": 7, "destId": 3, "communicationCost": 10.0}]
    (tmp_path / "graph.json").write_text(json.dumps({"nodes": nodes, "edges": edges}))
    graph = piper.read(tmp_path / "graph.json")
    assert [layer.name for layer in graph.layers] == [7, 3]
    assert graph.degrees() == [1]
    assert graph.edges == {(7, 3): 10.0}
    assert graph.layers[0].variants[1, True] == Variant(1.5, 4.0, 2.0, 6.0, {}, {3: 1.0})


def layer(name: int, seconds: float, before: list[int], after: list[int]) -> Layer:
    """4 bytes of weights; 8 bytes in flight and 6 besides, recomputed 2 and 7 for half a second."""
    ends = {source: 3.0 for source in before}, {destination: 1.0 for destination in after}
    choices = Variant(seconds, 4, 8, 6, *ends), Variant(seconds + 0.5, 4, 2, 7, *ends)
    return Layer(name, {(1, False): choices[0], (1, True): choices[1]})


def test_pipers_formulas() -> None:
    """Two stages, the first of two replicas, at 2 bytes a second and 4 micro-batches a batch.

    edge, by the first stage    2 (10 + 1) / 2 = 11 s            the second  2 (10 + 3) / 2 = 13 s
    gradients of the first      4 * 1/2 * 4 / (4 * 2) = 1 s      none
    seconds                     (1 + 11) / 2 + 1 = 7             2.5 + 13 = 15.5
    in flight                   ceil((2 + 1) / 2) = 2            1
    bytes                       8 * 2 + 6 = 22                   2 + 7 = 9
    """
    graph = Graph((layer(0, 1.0, [], [1]), layer(1, 2.0, [0], [])), {(0, 1): 10.0})
    stages = [
        Stage(frozenset({0}), 2, 1, frozenset()),
        Stage(frozenset({1}), 1, 1, frozenset({1})),
    ]
    found = piper.score(graph, Conditions(3, 0.0, 4, 2.0), stages)
    assert found.seconds == (7.0, 15.5)
    assert found.memory == (22.0, 9.0)
    assert found.objective == 15.5


@pytest.mark.parametrize(
    ("stages", "micro_batches", "says"),
    [
        ([({0}, 1)], 4, "each layer"),
        ([({0, 1}, 1), ({1}, 1)], 4, "each layer"),
        ([({1}, 1), ({0}, 1)], 4, "earlier stage"),
        ([({0}, 2), ({1}, 2)], 4, "3 devices"),
        ([({0}, 2), ({1}, 1)], 3, "divide 3"),
    ],
)
def test_what_is_no_plan(stages: list[tuple[set[int], int]], micro_batches: int, says: str) -> None:
    graph = Graph((layer(0, 1.0, [], [1]), layer(1, 2.0, [0], [])), {(0, 1): 10.0})
    made = [Stage(frozenset(layers), dp, 1, frozenset()) for layers, dp in stages]
    with pytest.raises(ValueError, match=says):
        piper.score(graph, Conditions(3, 0.0, micro_batches, 2.0), made)


def subsets(names: list[int]) -> Iterator[frozenset[int]]:
    for size in range(len(names) + 1):
        yield from map(frozenset, itertools.combinations(names, size))


def every_plan(graph: Graph, conditions: Conditions) -> Iterator[list[Stage]]:
    """Every assignment of layers to stages of one dp, and every choice of recomputed ones."""
    names = [one.name for one in graph.layers]
    for dp in range(1, conditions.devices + 1):
        for homes in itertools.product(range(conditions.devices // dp), repeat=len(names)):
            if set(homes) == set(range(max(homes) + 1)):
                for again in subsets(names):
                    yield [
                        Stage(layers, dp, 1, layers & again)
                        for home in range(max(homes) + 1)
                        for layers in [
                            frozenset(
                                name for name, at in zip(names, homes, strict=True) if at == home
                            )
                        ]
                    ]


@pytest.mark.parametrize("memory", [20.0, 30.0, 45.0, 80.0])
def test_the_exact_solver_against_all_plans(memory: float) -> None:
    """A diamond 0 -> 1, 2 -> 3 on three devices: the branches may be cut in either order."""
    edges = {(0, 1): 0.1, (0, 2): 0.2, (1, 3): 0.3, (2, 3): 0.1}
    seconds = [1.0, 2.5, 0.5, 1.5]
    layers = tuple(
        layer(
            name,
            seconds[name],
            [s for s, d in edges if d == name],
            [d for s, d in edges if s == name],
        )
        for name in range(4)
    )
    graph, conditions = Graph(layers, edges), Conditions(3, memory, 6, 100.0)
    best = math.inf
    for stages in every_plan(graph, conditions):
        try:
            found = piper.score(graph, conditions, stages)
        except ValueError:
            continue
        if max(found.memory) <= memory:
            best = min(best, found.objective)
    solved = exact.solve(graph, conditions)
    assert (solved is None) == (best == math.inf)
    if solved is not None:
        assert solved[0] == pytest.approx(best)
        assert piper.score(graph, conditions, solved[1]).objective == pytest.approx(best)
        assert max(piper.score(graph, conditions, solved[1]).memory) <= memory


def test_downsets_and_prefixes() -> None:
    """0 -> 2 <- 1: sources in either order, and the prefixes of one of the orders among them."""
    graph = Graph(
        (layer(0, 1.0, [], [2]), layer(1, 1.0, [], [2]), layer(2, 1.0, [0, 1], [])),
        {(0, 2): 1.0, (1, 2): 1.0},
    )
    closed = exact.downsets(graph)
    assert set(closed) == {frozenset(s) for s in ((), (0,), (1,), (0, 1), (0, 1, 2))}
    assert set(exact.prefixes(graph)) < set(closed)


MIB = 2**20


def diamonds(seed: int) -> Graph:
    """0 -> 1, 2 -> 3 -> 4, 5 -> 6 in MiB; recomputed, a layer has a' = a - k and b' = b + k."""
    numbers = random.Random(seed)
    edges = {(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6)}
    layers = []
    for name in range(7):
        seconds, parameters, fixed = (numbers.uniform(1, 9) for _ in range(3))
        in_flight = numbers.randint(5, 20)
        less = numbers.randint(1, 5) if numbers.random() < 0.7 else 0
        variants = {
            (tp, again): Variant(
                seconds / tp * 1.1 ** (tp - 1) + again * numbers.uniform(0.2, 0.6) * (less > 0),
                parameters / tp * MIB,
                (in_flight - again * less) / tp * MIB,
                (fixed + again * less) / tp * MIB,
                {source: (tp - 1) * 0.5 * MIB for source, _ in edges},
                {destination: (tp - 1) * 0.5 * MIB for _, destination in edges},
            )
            for tp in (1, 2)
            for again in (False, True)
        }
        layers.append(Layer(name, variants))
    return Graph(tuple(layers), {edge: numbers.uniform(0.1, 1) * MIB for edge in sorted(edges)})


@pytest.mark.parametrize("seed", range(12))
def test_the_planner_solves_pipers_problems(seed: int) -> None:
    """With the layers in one order, as exactly as the plain solver, and by Piper's own formulas."""
    graph = diamonds(seed)
    memory = random.Random(seed).choice([30.0, 45.0, 60.0, 90.0, 150.0]) * MIB
    conditions = Conditions(4, memory, 12, 4.0 * MIB)
    solved = exact.solve(graph, conditions, chain=True)
    found = piper_problem.plan(graph, conditions)
    assert (found is None) == (solved is None)
    if found is not None and solved is not None:
        scored = piper.score(graph, conditions, found[1])
        assert found[0] == pytest.approx(scored.objective, rel=1e-4)
        assert scored.objective == pytest.approx(solved[0], rel=1e-4)
        assert max(scored.memory) <= memory * (1 + 1e-9)


def test_a_row_of_pipers() -> None:
    """What one of both alone finds is wrong; of what both find, theirs to ours is the ratio."""
    graph = diamonds(0)
    row = cases.of_piper(graph, cases.PiperCase(4, 1, 12, 2.0, 0.1, "theirs"))
    assert row["feasible"]
    assert row["ratio"] == 2.0 / row["ours"]
    assert (row["wrong"], row["unsupported"], row["cpu_theirs"]) == ([], "", 0.1)
    none = cases.of_piper(graph, cases.PiperCase(4, 0, 12, 2.0, 0.1, "theirs"))
    assert (none["ours"], none["ratio"], none["feasible"]) == (None, None, False)
    assert none["wrong"] == ["a plan fits for one of both alone"]
    told = table([row, none]).splitlines()
    assert told[2].endswith(f"| theirs | {row['plan_ours']} |")
    assert "4 devices of 0 GiB, 12 micro-batches | 2 |  |  | 0.1 |" in told[3]
