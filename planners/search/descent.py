"""The path of the shortest step through layers of arcs: sums, maxima, and descents over thresholds.

A path takes one arc and one range of units for each stage. An arc has for every range [i, j) the
seconds t_s, the period and the exposed seconds of its stage. Of a path, T is the sum of the first,
M the largest of the second, E the largest of the third:

    step = of_sum * T + of_largest * max(M, floor) + E

T, M and E are each easy. A state is how many groups of each class the stages before s have used,
and the class of the last, u = (used, last): that tells which group comes next in every class, and
the link to it. Let V_s[u, i] be the best value of stages s .. p - 1 on the units [i, n):

    V_p[u, n] = 0
    V_s[u, i] = min over classes c and j > i of  t_s(u, c, i, j) (+) V_{s+1}[u + c, j]  `best_path`

with (+) a sum gives the least T, and with (+) a maximum the least M, which is M*.
Where all devices are alike there is one class, and a state for each s: a program over cuts alone.

**T and M at once.** For a threshold L let T(L) be the least T of the cuts whose stages all take at
most L: the sum program with longer ranges forbidden. T(L) never rises with L, and the optimum is
min over L >= M* of T(L) + (m - 1) * L. Where the best step known is B, the descent   -> `_descent`

    L = infinity;  repeat:  find cuts with T(L), and their M <= L;  B = min(B, T(L) + (m - 1) * M)
                            L = min(just below M, (B - T(L)) / (m - 1))

skips nothing that is better: cuts with a maximum in (M, L] have a sum of at least T(L), and cuts
that beat B have a maximum below (B - T) / (m - 1) with T >= T(L). It ends as soon as
T(L) + (m - 1) * M* >= B. Starting from B = T(M*) + (m - 1) * M*, that takes few rounds.

**And E.** The same once more around it: for a threshold X let S(X) be the least T + (m - 1) * M of
cuts whose stages all have exposed_s <= X.                                          -> `fastest`

    X = infinity;  repeat:  find cuts with S(X), and their E <= X;  B = min(B, S(X) + E)
                            X = min(just below E, B - S(X))

Cuts with an E in (E, X] are no better, and it ends as soon as S(X) + E* >= B. Mostly that is in the
first round: stage 0 alone is exposed. So its own sum is taken into T first, and if in the cuts that
are then the best no other stage's is longer, these are the best of all: for any cuts T + exposed_0
+ (m - 1) * M is no more than their step.

A program takes O(p n^2) a state, in numpy. The descent is that of Hansen's paths of least sum and
least maximum (Bicriterion path problems, 1980), on the graph whose nodes are cuts; the objective is
Alpa's (Zheng et al., OSDI 2022, section 5), which walks up the thresholds instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.planners.model.level_mixes import Numbers
from autopipe.planners.model.recompute_sets import RecomputeSets

Array = NDArray[np.float64]
"""By range: entry [i, j] is of the units [i, j), infinite where a stage may not be that."""

TOLERANCE = 1e-9
"""Steps whose seconds differ by less, relatively, tie: the order of a sum must decide nothing."""

NEXT = 1 - 1e-12
"""Times a maximum: just below it, past those that differ by the order of a sum."""


class GroupsUsed(NamedTuple):
    """How many groups of each class are used, and the last one."""

    used: tuple[int, ...]
    last: int | None


class RangeCosts(NamedTuple):
    """What every range of units costs in one place; each array has shape (units + 1, units + 1).

    Attributes:
        seconds: what a range adds to T; infinite where it does not fit.
        periods: what M is the maximum of; infinite where the range does not fit.
        exposed: what E is the maximum of.
        beyond: bytes more than the group may hold; infinite where the range is empty.
        recomputed: for each range the number of the set of `sets` that is recomputed in it.
        sets: the sets of blocks that may be recomputed in this place.
    """

    seconds: Array
    periods: Array
    exposed: Array
    beyond: Array
    recomputed: Numbers
    sets: RecomputeSets


@dataclass(frozen=True, eq=False)
class Arc:
    """A group of devices takes a stage.

    Attributes:
        source: the groups used before it.
        target: the groups used after it.
        group: the group that it takes.
        costs: what each range of units costs there.
    """

    source: GroupsUsed
    target: GroupsUsed
    group: int
    costs: RangeCosts


Layers = list[list[Arc]]
"""Of each stage its arcs."""


class StagePath(NamedTuple):
    """For each stage an arc and its range: stage s has the units [cuts[s - 1], cuts[s])."""

    value: float
    cuts: tuple[int, ...]
    groups: tuple[int, ...]
    arcs: tuple[Arc, ...]

    @property
    def ranges(self) -> Iterator[tuple[Arc, tuple[int, int]]]:
        """Its arcs, each with its range of units."""
        bounds = (0, *self.cuts, len(self.arcs[0].costs.periods) - 1)
        return zip(self.arcs, pairwise(bounds), strict=True)

    def sum(self, of: Of) -> float:
        """The sum over its stages of a field of their costs."""
        return float(sum(of(arc)[taken] for arc, taken in self.ranges))

    def most(self, of: Of) -> float:
        """The maximum over its stages of a field of their costs."""
        return float(max(of(arc)[taken] for arc, taken in self.ranges))


Of = Callable[[Arc], Array]
"""What ranges cost on an arc."""


def _seconds(arc: Arc) -> Array:
    return arc.costs.seconds


def _periods(arc: Arc) -> Array:
    return arc.costs.periods


def _exposed(arc: Arc) -> Array:
    return arc.costs.exposed


def _masked(of: Of, by: Of, limit: float) -> Of:
    """An array, with infinity where another array is above a limit."""
    known: dict[tuple[int, int], Array] = {}  # by the arrays, which arcs of one place share

    def masked(arc: Arc) -> Array:
        mine, other = of(arc), by(arc)
        key = id(mine), id(other)
        if key not in known:
            known[key] = np.where(other <= limit, mine, np.inf)
        return known[key]

    return masked


def fastest(layers: Layers, weights: tuple[float, float], floor: float) -> StagePath | None:
    """The path of the least step, by the descents over thresholds; None if no cuts fit.

    Args:
        weights: of T and of M in the step.
        floor: what M counts as at least.
    """
    of_sum, of_largest = weights
    firsts = set(layers[0])

    @cache
    def with_first(arc: Arc) -> Array:
        seconds, exposed = arc.costs.seconds, arc.costs.exposed
        return seconds + exposed / of_sum if arc in firsts and of_sum else seconds

    best = _descent(layers, weights, floor, with_first, _periods)
    if best is None:
        return None
    (first, taken), *_ = best.ranges
    if best.most(_exposed) <= first.costs.exposed[taken]:
        return best

    def through(path: StagePath) -> float:
        """The step without what is exposed."""
        return of_sum * path.sum(_seconds) + of_largest * max(path.most(_periods), floor)

    least = best_path(np.maximum, layers, _exposed).value
    step, limit = through(best) + best.most(_exposed), np.inf
    while limit >= least:
        masked = (_masked(of, _exposed, limit) for of in (_seconds, _periods))
        path = _descent(layers, weights, floor, *masked)
        if path is None:
            break
        longest = path.most(_exposed)
        if through(path) + longest < step * (1 - TOLERANCE):
            step, best = through(path) + longest, path
        if through(path) + least >= step * NEXT or longest <= least:
            break
        limit = min(longest * NEXT, step - through(path))
    return best


def _descent(
    layers: Layers, weights: tuple[float, float], floor: float, seconds: Of, periods: Of
) -> StagePath | None:
    """The path of the least weighted sum of T and M; None if no cuts fit.

    Args:
        seconds, periods: what goes into T and M, infinite where a range is not to be taken.
    """
    of_sum, of_largest = weights
    least = best_path(np.maximum, layers, periods).value
    if least == np.inf:
        return None

    def under(limit: float) -> tuple[float, float, StagePath]:
        """The step and T of the least T with no period longer than `limit`."""
        path = best_path(np.add, layers, _masked(seconds, periods, limit))
        total = of_sum * path.value
        return total + of_largest * max(path.most(periods), floor), total, path

    step, _, best = under(least / NEXT)
    limit = np.inf
    while limit >= least:
        found, total, path = under(limit)
        if found < step * (1 - TOLERANCE):
            step, best = found, path
        if total + of_largest * max(least, floor) >= step * NEXT or of_largest == 0:
            break
        limit = min(path.most(periods) * NEXT, (step - total) / of_largest)
    return best


_Join = Callable[[Array, Array], Array]


def best_path(join: _Join, layers: Layers, of: Of) -> StagePath:
    """The path of the least value by the module's recurrence; of equal ones that whose groups and
    then whose cuts come first, up to the rounding of sums."""
    end = np.full(len(layers[0][0].costs.seconds), np.inf)
    end[-1] = 0.0
    tails: list[dict[GroupsUsed, Array]] = [{arc.target: end for arc in layers[-1]}]
    for arcs in reversed(layers):
        at_layer: dict[GroupsUsed, Array] = {}
        for arc in arcs:
            value = join(of(arc), tails[-1][arc.target]).min(axis=1)
            at_layer[arc.source] = np.minimum(at_layer.get(arc.source, value), value)
        tails.append(at_layer)
    tails.reverse()

    (state,) = tails[0]
    at, bounds, path = 0, [], []
    for arcs, at_layer, after in zip(layers, tails, tails[1:], strict=False):
        for arc in (arc for arc in arcs if arc.source == state):
            least_here = join(of(arc)[at], after[arc.target]) <= at_layer[state][at] / NEXT
            if least_here.any():
                break
        at, state = int(np.argmax(least_here)), arc.target
        bounds.append(at)
        path.append(arc)
    value = float(next(iter(tails[0].values()))[0])
    return StagePath(value, tuple(bounds[:-1]), tuple(arc.group for arc in path), tuple(path))
