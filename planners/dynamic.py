"""The fastest plan, exactly, by dynamic programs over stages from the last one backwards.

**Variables.** A frame (pp, dp, m, zero, schedule, depth) is fixed: frames are tried one after the
other. Left are the cuts 0 = c_0 < c_1 < ... < c_p = n of n units into p stages, the group of
devices g_s that holds stage s, and the blocks R_s that run again in it.

**Constraints.** Stage s holds in_flight(s) micro-batches, a number that its place alone decides;
no group holds two stages, and those of one class are used in rank order;

    peak_s(c_s, c_{s+1}, R_s) <= room(g_s)          else t_s = infinity         -> `estimate.costs`

R_s matters to its own stage alone: of all that fit the cheapest is taken before anything else
(`autopipe.reruns`), and t_s(i, j) is a number for every place and range.

**Objective.** By `autopipe.estimate`, with t_s the seconds of a micro-batch in stage s,

    step = T + (m - 1) * M + E,    T = sum_s t_s,    M = max_s t_s,    E = max_s exposed_s

or with other weights than 1 and m - 1, another t_s for M, or M no less than a constant, where the
schedule asks for them; what follows holds for any. exposed_s is, as t_s, a number for every place
and range: what of the stage's sum of gradients the backwards before it do not hide.

T, M and E are each easy. A state is how many groups of each class the stages before s have used,
and the class of the last, u = (used, last): that tells which group comes next in every class, and
the link to it. Let V_s[u, i] be the best value of stages s .. p - 1 on the units [i, n):

    V_p[u, n] = 0
    V_s[u, i] = min over classes c and j > i of  t_s(u, c, i, j) (+) V_{s+1}[u + c, j]   -> `_best`

with (+) a sum gives the least T, and with (+) a maximum the least M, which is M*.
Where all devices are alike there is one class, and a state for each s: a program over cuts alone.

**T and M at once.** For a threshold L let T(L) be the least T of the cuts whose stages all take at
most L: the sum program with longer ranges forbidden. T(L) never rises with L, and the optimum is
min over L >= M* of T(L) + (m - 1) * L. Where the best step known is B, the descent   -> `_fastest`

    L = infinity;  repeat:  find cuts with T(L), and their M <= L;  B = min(B, T(L) + (m - 1) * M)
                            L = min(just below M, (B - T(L)) / (m - 1))

skips nothing that is better: cuts with a maximum in (M, L] have a sum of at least T(L), and cuts
that beat B have a maximum below (B - T) / (m - 1) with T >= T(L). It ends as soon as
T(L) + (m - 1) * M* >= B. Starting from B = T(M*) + (m - 1) * M*, that takes few rounds.

**And E.** The same once more around it: for a threshold X let S(X) be the least T + (m - 1) * M of
cuts whose stages all have exposed_s <= X.                                          -> `_fastest`

    X = infinity;  repeat:  find cuts with S(X), and their E <= X;  B = min(B, S(X) + E)
                            X = min(just below E, B - S(X))

Cuts with an E in (E, X] are no better, and it ends as soon as S(X) + E* >= B. Mostly that is in the
first round: stage 0 alone is exposed. So its own sum is taken into T first, and if in the cuts that
are then the best no other stage's is longer, these are the best of all: for any cuts T + exposed_0
+ (m - 1) * M is no more than their step.

Where no cuts fit, the maximum program over the bytes beyond what a group may hold finds those
whose fullest stage is the least too full. A program takes O(p n^2) a state, in numpy. The descent
is that of Hansen's paths of least sum and least maximum (Bicriterion path problems, 1980), on the
graph whose nodes are cuts; the objective is Alpa's (Zheng et al., OSDI 2022, section 5), which
walks up the thresholds instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.estimate import (
    floor_seconds,
    in_flights,
    place_of,
    placement,
    profile_of,
    weights,
)
from autopipe.planners import answer
from autopipe.planners.answer import TOLERANCE, Answer, Mesh, Scored, best_answer
from autopipe.planners.orders import Classes, classes
from autopipe.problem import Decision, Frame, Problem
from autopipe.reruns import Numbers, Reruns, blocks_of, compositions
from autopipe.stage_costs import Place, costs, sets_of
from autopipe.tables import tables

Array = NDArray[np.float64]
"""By range: entry [i, j] is of the units [i, j), infinite where a stage may not be that."""

NEXT = 1 - 1e-12
"""Times a maximum: just below it, past those that differ by the order of a sum."""


def dynamic(problem: Problem, rivals: Sequence[float] = (), mesh: Mesh | None = None) -> Answer:
    """Plan exactly, where each rank has one stage; where it has several, each stage gets an equal
    share of its device and the devices stand in rank order, and what only other shares or another
    order would fit is not found.

    Of equally fast cuts in a frame it takes some with the least maximum, M*, if those are among
    them, and then the earliest: the first stages, where most is in flight, have the least to hold.

    Raises:
        InfeasibleError: no plan fits; the message carries the one that comes nearest.
    """
    return best_answer(problem, choose, rivals=rivals, mesh=mesh, fitting=_fitting)


def fastest(problem: Problem) -> Scored | None:
    """What `dynamic` decides, without its reasons and quicker; None: nothing fits."""
    return answer.fastest(problem, _fitting)


def _fitting(problem: Problem, frame: Frame) -> Decision | None:
    """The fastest decision of a frame, if one fits."""
    path = _fastest(_arcs(problem, frame), weights(problem, frame), floor_seconds(problem, frame))
    return None if path is None else path.decision(problem, frame)


def choose(problem: Problem, frame: Frame) -> Decision:
    """The fastest decision of a frame that fits, else the one that is nearest to fitting."""
    arcs = _arcs(problem, frame)
    path = _fastest(arcs, weights(problem, frame), floor_seconds(problem, frame))
    if path is None:
        path = _best(np.maximum, arcs, lambda arc: arc.beyond)
    return path.decision(problem, frame)


class _State(NamedTuple):
    """How many groups of each class are used, and the last one."""

    used: tuple[int, ...]
    last: int | None


@dataclass(frozen=True, eq=False)
class _Arc:
    """A group for a stage: from the state before it to the one after, and what ranges cost there.

    `seconds` go into T, `periods` into M and `exposed` into E, the first two infinite where a range
    does not fit; `beyond` are bytes more than the group may hold; `again` are numbers of the
    place's `sets` of blocks.
    """

    source: _State
    target: _State
    group: int
    seconds: Array
    periods: Array
    exposed: Array
    beyond: Array
    again: Numbers
    sets: Reruns


_Layers = list[list[_Arc]]
"""Of each stage its arcs."""


class _Path(NamedTuple):
    value: float
    cuts: tuple[int, ...]
    groups: tuple[int, ...]
    arcs: tuple[_Arc, ...]

    @property
    def ranges(self) -> Iterator[tuple[_Arc, tuple[int, int]]]:
        """Its arcs and what each takes."""
        bounds = (0, *self.cuts, len(self.arcs[0].periods) - 1)
        return zip(self.arcs, pairwise(bounds), strict=True)

    def sum(self, of: _Of) -> float:
        """Of its stages, the sum of something."""
        return float(sum(of(arc)[taken] for arc, taken in self.ranges))

    def most(self, of: _Of) -> float:
        """Of its stages, the largest of something."""
        return float(max(of(arc)[taken] for arc, taken in self.ranges))

    def decision(self, problem: Problem, frame: Frame) -> Decision:
        """With the blocks that must run again."""
        ranks = placement(problem.constraints, frame.schedule, frame.pp)
        groups = dict(zip(ranks, self.groups, strict=True))
        again = tuple(
            blocks_of(problem, *taken, arc.sets.counts[int(arc.again[taken])])
            for arc, taken in self.ranges
        )
        return Decision(frame, self.cuts, again, tuple(groups[rank] for rank in range(frame.pp)))


def _arcs(problem: Problem, frame: Frame) -> _Layers:
    """All that the stages of a frame may be."""
    profile = profile_of(problem, frame.dp, frame.micro_batches)
    assert profile is not None, "a frame has a profile"
    ranges, numbers = tables(problem, profile), compositions(problem).number
    units = np.arange(problem.units + 1)
    empty = units[:, None] >= units[None, :]

    @cache
    def costing(place: Place) -> tuple[Array, Array, Array, Array, Numbers, Reruns]:
        found = costs(problem, frame, place, ranges, numbers)
        misfit = (found.peaks > place.room) | empty
        return (
            np.where(misfit, np.inf, found.seconds.whole),
            np.where(misfit, np.inf, found.seconds.period),
            found.seconds.exposed,
            np.where(empty, np.inf, found.peaks - place.room),
            found.again,
            sets_of(problem, frame, place),
        )

    layers = []
    for stage, (held, steps) in enumerate(
        zip(in_flights(problem, frame), _steps(problem, frame), strict=True)
    ):
        layers.append(
            [
                _Arc(
                    source,
                    target,
                    group,
                    *costing(place_of(problem, frame, stage, held, group, earlier)),
                )
                for source, target, group, earlier in steps
            ]
        )
    return layers


_Step = tuple[_State, _State, int, int | None]
"""From a state to the next one, the group that takes the stage, and the one before it."""


def _steps(problem: Problem, frame: Frame) -> list[list[_Step]]:
    """Of each stage all steps that any order of groups takes there."""
    known = classes(problem, frame)
    if len(known) == 1:
        ranks = placement(problem.constraints, frame.schedule, frame.pp)
        states = [_State((stage,), 0) for stage in range(len(ranks) + 1)]
        earlier = [None, *ranks]
        return [
            [(states[stage], states[stage + 1], rank, earlier[stage])]
            for stage, rank in enumerate(ranks)
        ]
    layers: list[list[_Step]] = []
    reached = [_State((0,) * len(known), None)]
    for _ in range(frame.pp):
        layers.append([step for state in reached for step in _further(known, state)])
        reached = list(dict.fromkeys(target for _, target, _, _ in layers[-1]))
    return layers


def _further(known: Classes, state: _State) -> Iterator[_Step]:
    """The steps from a state: one to each class that has a group left."""
    used, last = state
    earlier = None if last is None else known[last][used[last] - 1]
    for kind, groups in enumerate(known):
        if used[kind] < len(groups):
            taken = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
            yield state, _State(taken, kind), groups[used[kind]], earlier


_Of = Callable[[_Arc], Array]
"""What ranges cost on an arc."""


def _seconds(arc: _Arc) -> Array:
    return arc.seconds


def _periods(arc: _Arc) -> Array:
    return arc.periods


def _exposed(arc: _Arc) -> Array:
    return arc.exposed


def _masked(of: _Of, by: _Of, limit: float) -> _Of:
    """The same, and infinite where something else is above a limit."""
    known: dict[tuple[int, int], Array] = {}  # by the arrays, which arcs of one place share

    def masked(arc: _Arc) -> Array:
        mine, other = of(arc), by(arc)
        key = id(mine), id(other)
        if key not in known:
            known[key] = np.where(other <= limit, mine, np.inf)
        return known[key]

    return masked


def _fastest(layers: _Layers, weights: tuple[float, float], floor: float) -> _Path | None:
    """The path of the least step, by the descents over thresholds; None if no cuts fit.

    Args:
        weights: of T and of M in the step.
        floor: what M counts as at least.
    """
    of_sum, of_largest = weights
    firsts = set(layers[0])

    @cache
    def with_first(arc: _Arc) -> Array:
        return arc.seconds + arc.exposed / of_sum if arc in firsts and of_sum else arc.seconds

    best = _descent(layers, weights, floor, with_first, _periods)
    if best is None:
        return None
    (first, taken), *_ = best.ranges
    if best.most(_exposed) <= first.exposed[taken]:
        return best

    def through(path: _Path) -> float:
        """The step without what is exposed."""
        return of_sum * path.sum(_seconds) + of_largest * max(path.most(_periods), floor)

    least = _best(np.maximum, layers, _exposed).value
    step, limit = through(best) + best.most(_exposed), np.inf
    while limit >= least:
        masked = (_masked(of, _exposed, limit) for of in (_seconds, _periods))
        path = _descent(layers, weights, floor, *masked)
        if path is None:
            break
        found = through(path) + path.most(_exposed)
        if found < step * (1 - TOLERANCE):
            step, best = found, path
        if through(path) + least >= step * NEXT:
            break
        limit = min(path.most(_exposed) * NEXT, step - through(path))
    return best


def _descent(
    layers: _Layers, weights: tuple[float, float], floor: float, seconds: _Of, periods: _Of
) -> _Path | None:
    """The path of the least weighted sum of T and M; None if no cuts fit.

    Args:
        seconds, periods: what goes into T and M, infinite where a range is not to be taken.
    """
    of_sum, of_largest = weights
    least = _best(np.maximum, layers, periods).value
    if least == np.inf:
        return None

    def under(limit: float) -> tuple[float, float, _Path]:
        """The step and T of the least T with no period longer than `limit`."""
        path = _best(np.add, layers, _masked(seconds, periods, limit))
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


def _best(join: _Join, layers: _Layers, of: _Of) -> _Path:
    """The path of the least value by the module's recurrence; of equal ones that whose groups and
    then whose cuts come first, up to the rounding of sums."""
    end = np.full(len(layers[0][0].seconds), np.inf)
    end[-1] = 0.0
    tails: list[dict[_State, Array]] = [{arc.target: end for arc in layers[-1]}]
    for arcs in reversed(layers):
        here: dict[_State, Array] = {}
        for arc in arcs:
            value = join(of(arc), tails[-1][arc.target]).min(axis=1)
            here[arc.source] = np.minimum(here.get(arc.source, value), value)
        tails.append(here)
    tails.reverse()

    (state,) = tails[0]
    at, bounds, taken = 0, [], []
    for arcs, here, after in zip(layers, tails, tails[1:], strict=False):
        for arc in (arc for arc in arcs if arc.source == state):
            good = join(of(arc)[at], after[arc.target]) <= here[state][at] / NEXT
            if good.any():
                break
        at, state = int(np.argmax(good)), arc.target
        bounds.append(at)
        taken.append(arc)
    value = float(next(iter(tails[0].values()))[0])
    return _Path(value, tuple(bounds[:-1]), tuple(arc.group for arc in taken), tuple(taken))
