"""The best plan of a Piper problem with one tp and one dp for all stages, by dynamic programming.

Piper's own search over downsets, less its choice of degrees per stage, and with the recomputed
layers of a stage chosen exactly where Piper takes them greedily by seconds per byte. A downset D is
the layers of the first stages, closed under predecessors; y is how many stages follow.

    best(all layers, 0)  =  0
    best(D, y)           =  least over larger downsets E of  max( stage(E - D, y), best(E, y - 1) )
    stage(L, y)          =  least time of layers L as one stage with y micro-batches in flight

With equal degrees a stage that y - 1 stages follow has y in flight. It is slow and plain: what the
planner is held against.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks.planners.piper import Conditions, Graph, Stage, time


def solve(
    graph: Graph, conditions: Conditions, *, chain: bool = False
) -> tuple[float, list[Stage]] | None:
    """The least objective with equal degrees and a plan that has it; None: nothing fits.

    Args:
        chain: only cut the graph's topological order, as a planner of chains does.
    """
    best = None
    for tp in graph.degrees():
        for dp in range(1, conditions.devices // tp + 1):
            if conditions.micro_batches % dp == 0:
                found = _solve(graph, conditions, tp, dp, chain)
                if found is not None and (best is None or found[0] < best[0]):
                    best = found
    return best


def downsets(graph: Graph) -> list[frozenset[int]]:
    """Every set of layers that holds all predecessors of its own, by size."""
    needed = {
        layer.name: {source for source, destination in graph.edges if destination == layer.name}
        for layer in graph.layers
    }
    found = [frozenset[int]()]
    seen = set(found)
    for known in found:
        for name, before in needed.items():
            larger = known | {name}
            if name not in known and before <= known and larger not in seen:
                seen.add(larger)
                found.append(larger)
    return found


def prefixes(graph: Graph) -> list[frozenset[int]]:
    """The downsets along the graph's order."""
    names = [layer.name for layer in graph.layers]
    return [frozenset(names[:length]) for length in range(len(names) + 1)]


def _solve(
    graph: Graph, conditions: Conditions, tp: int, dp: int, chain: bool
) -> tuple[float, list[Stage]] | None:
    sets = prefixes(graph) if chain else downsets(graph)
    depth = min(conditions.devices // (tp * dp), conditions.micro_batches // dp, len(graph.layers))
    best: dict[tuple[frozenset[int], int], tuple[float, list[Stage]]] = {(sets[-1], 0): (0.0, [])}
    for smaller in reversed(sets[:-1]):
        for larger in sets:
            if smaller < larger:
                choices = _choices(graph, conditions, larger - smaller, tp, dp)
                for following in range(depth):
                    after = best.get((larger, following))
                    if after is None:
                        continue
                    one = _stage(choices, conditions.memory, following + 1)
                    if one is None:
                        break  # more micro-batches in flight never need fewer bytes
                    value = max(one[0], after[0])
                    known = best.get((smaller, following + 1))
                    if known is None or value < known[0]:
                        stage = Stage(larger - smaller, dp, tp, one[1])
                        best[smaller, following + 1] = (value, [stage, *after[1]])
    whole = [best[sets[0], count] for count in range(1, depth + 1) if (sets[0], count) in best]
    return min(whole, key=lambda found: found[0], default=None)


Choice = tuple[int, tuple[tuple[float, float, float], ...]]
"""A layer's name and (seconds, bytes in flight, bytes besides): as it is, and recomputed."""


def _choices(
    graph: Graph, conditions: Conditions, layers: frozenset[int], tp: int, dp: int
) -> list[Choice]:
    found = []
    for layer in graph.layers:
        if layer.name in layers:
            kinds = []
            for recomputed in (False, True):
                variant = layer.variants[tp, recomputed]
                seconds = time(graph, conditions, layers, layer, variant, dp)
                kinds.append((seconds, variant.in_flight, variant.fixed))
            found.append((layer.name, tuple(kinds)))
    return found


def _stage(
    choices: list[Choice], memory: float, flights: int
) -> tuple[float, frozenset[int]] | None:
    """The least seconds that fit, and the layers recomputed: all selections no other one beats."""
    front = [(0.0, 0.0, frozenset[int]())]
    for name, kinds in choices:
        grown = [
            (seconds + spent, used + held * flights + fixed, chosen | {name} if again else chosen)
            for seconds, used, chosen in front
            for again, (spent, held, fixed) in enumerate(kinds)
        ]
        front = list(_undominated(grown))
    fitting = [(seconds, chosen) for seconds, used, chosen in front if used <= memory]
    return min(fitting, key=lambda found: found[0], default=None)


def _undominated(
    selections: list[tuple[float, float, frozenset[int]]],
) -> Iterator[tuple[float, float, frozenset[int]]]:
    least = math.inf
    for selection in sorted(selections, key=lambda one: one[:2]):
        if selection[1] < least:
            least = selection[1]
            yield selection
