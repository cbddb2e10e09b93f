"""The fastest plan, exactly, by dynamic programs over stages from the last one backwards.

**Variables.** A frame (pp, dp, m) is fixed: there are few, and all are tried. Left are the cuts
0 = c_0 < c_1 < ... < c_p = n of n units into p stages.

**Constraints.** Stage s holds in_flight(s) micro-batches, a number that its place alone decides:

    peak_s(c_s, c_{s+1}) <= room             else t_s(c_s, c_{s+1}) = infinity    -> `_seconds`

**Objective.** By `autopipe.estimate`, with t_s the seconds of a micro-batch in stage s,

    step = T + (m - 1) * M,    T = sum_s t_s + reduce_0,    M = max_s t_s

or with other weights than 1 and m - 1, and under eager-1f1b another t_s for M, where the schedule
asks for them; what follows holds for any.

T and M are each easy. Let V_s[i] be the best value of stages s .. p - 1 on the units [i, n):

    V_p[n] = 0,    V_s[i] = min over j > i of  t_s(i, j) (+) V_{s+1}[j]                -> `_tails`

with (+) a sum gives the least T, and with (+) a maximum the least M, which is M*.

**Both at once.** For a threshold L let T(L) be the least T of the cuts whose stages all take at
most L: the sum program with longer ranges forbidden. T(L) never rises with L, and the optimum is
min over L >= M* of T(L) + (m - 1) * L. Where the best step known is B, the descent   -> `_fastest`

    L = infinity;  repeat:  find cuts with T(L), and their M <= L;  B = min(B, T(L) + (m - 1) * M)
                            L = min(just below M, (B - T(L)) / (m - 1))

skips nothing that is better: cuts with a maximum in (M, L] have a sum of at least T(L), and cuts
that beat B have a maximum below (B - T) / (m - 1) with T >= T(L). It ends as soon as
T(L) + (m - 1) * M* >= B. Starting from B = T(M*) + (m - 1) * M*, that takes few rounds.

Where no cuts fit, the maximum program over peaks finds those whose fullest stage is the least
full. A program takes O(p n^2), in numpy. The descent is that of Hansen's paths of least sum and
least maximum (Bicriterion path problems, 1980), on the graph whose nodes are cuts; the objective
is Alpa's (Zheng et al., OSDI 2022, section 5), which walks up the thresholds instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autopipe.estimate import (
    in_flights,
    peak,
    periods,
    profile_of,
    reduce_seconds,
    room,
    stage_seconds,
    weights,
)
from autopipe.planners.answer import TOLERANCE, Answer, best_answer
from autopipe.planners.search import Frame, undominated
from autopipe.problem import Decision, Problem
from autopipe.tables import Tables, tables

Costs = NDArray[np.float64]
"""By range: entry [i, j] is of the units [i, j), infinite where a stage may not be that."""

Cuts = tuple[int, ...]

NEXT = 1 - 1e-12
"""Times a maximum: just below it, past those that differ by the order of a sum."""


def dynamic(problem: Problem) -> Answer:
    """Plan exactly, where each rank has one stage; where it has several, each stage gets an equal
    share of its device, and what only unequal shares would fit is not found.

    Of equally fast cuts in a frame it takes some with the least maximum, M*, if those are among
    them, and then the earliest: the first stages, where most is in flight, have the least to hold.

    Raises:
        InfeasibleError: no plan fits; the message carries the one that comes nearest.
    """
    return best_answer(problem, _choose)


def _choose(problem: Problem, frame: Frame) -> Decision:
    profile = profile_of(problem, frame.dp, frame.micro_batches)
    assert profile is not None, "a frame has a profile"
    ranges = tables(problem, profile)
    reduce = reduce_seconds(ranges, problem, frame.dp)

    nearest: list[tuple[float, Decision]] = []
    fastest: list[tuple[float, Decision]] = []
    for name in undominated(problem, frame):
        peaks = _peaks(ranges, problem, frame, name)
        of_sum, of_largest = weights(problem, name, frame.micro_batches)
        found = _fastest(
            _fitting(peaks, room(problem, name), of_sum * stage_seconds(ranges, problem, frame.dp)),
            _fitting(peaks, room(problem, name), periods(ranges, problem, name, frame.dp)),
            reduce,
            of_largest,
        )
        if found is not None:
            step, cuts = found
            fastest.append((step, Decision(*frame, name, cuts)))
        elif not fastest:
            tails = _tails(np.maximum, peaks)
            cuts = _walk(np.maximum, peaks, tails)
            nearest.append((tails[0][0], Decision(*frame, name, cuts)))
    return min(fastest or nearest, key=lambda choice: choice[0])[1]


def _peaks(ranges: Tables, problem: Problem, frame: Frame, name: str) -> list[Costs]:
    """Peak bytes per stage and range."""
    units = np.arange(problem.units + 1)
    empty = units[:, None] >= units[None, :]
    # Linear in the micro-batches in flight: two evaluations serve all stages.
    none, one = (
        peak(ranges, problem, frame.micro_batches, n, frame.dp).astype(float) for n in (0, 1)
    )
    none[empty] = np.inf
    each = np.where(empty, 0.0, one - none)
    return [none + n * each for n in in_flights(problem, name, frame.pp, frame.micro_batches)]


def _fitting(peaks: Sequence[Costs], limit: int, seconds: Costs) -> list[Costs]:
    """Seconds per stage and range, infinite where a range does not fit."""
    return [np.where(bytes <= limit, seconds, np.inf) for bytes in peaks]


def _fastest(
    seconds: Sequence[Costs], periods: Sequence[Costs], reduce: Costs, weight: float
) -> tuple[float, Cuts] | None:
    """The least step and its cuts, by the descent over thresholds; None if no cuts fit.

    Args:
        seconds: what a stage adds to T, one array per stage.
        periods: those of which M is the largest.
        reduce: seconds of the all-reduce, for the range that stage 0 gets.
        weight: of M in the step.
    """
    least = float(_tails(np.maximum, periods)[0][0])
    if least == np.inf:
        return None
    total, longest, cuts = _under(least / NEXT, seconds, periods, reduce)
    best = total + weight * longest, cuts
    limit = np.inf
    while limit >= least:
        total, longest, cuts = _under(limit, seconds, periods, reduce)
        step = total + weight * longest
        if step < best[0] * (1 - TOLERANCE):
            best = step, cuts
        if total + weight * least >= best[0] * NEXT or weight == 0:
            break
        limit = min(longest * NEXT, (best[0] - total) / weight)
    return best


def _under(
    limit: float, seconds: Sequence[Costs], periods: Sequence[Costs], reduce: Costs
) -> tuple[float, float, Cuts]:
    """The least T with no period longer than `limit`, its M and its cuts."""
    costs = [
        np.where(period <= limit, stage, np.inf)
        for stage, period in zip(seconds, periods, strict=True)
    ]
    costs[0] = costs[0] + reduce
    tails = _tails(np.add, costs)
    cuts = _walk(np.add, costs, tails)
    bounds = (0, *cuts, len(reduce) - 1)
    longest = max(period[bounds[s], bounds[s + 1]] for s, period in enumerate(periods))
    return float(tails[0][0]), float(longest), cuts


_Join = Callable[[Costs, Costs], Costs]


def _tails(join: _Join, costs: Sequence[Costs]) -> list[Costs]:
    """V_0 .. V_p of the module's recurrence: entry [i] of V_s is of the units [i, n)."""
    tail = np.full(len(costs[0]), np.inf)
    tail[-1] = 0.0
    tails = [tail]
    for stage in reversed(costs):
        tails.append(join(stage, tails[-1]).min(axis=1))
    return tails[::-1]


def _walk(join: _Join, costs: Sequence[Costs], tails: Sequence[Costs]) -> Cuts:
    """The earliest cuts that reach the value of V_0[0], up to the rounding of sums."""
    cuts: list[int] = []
    at = 0
    for stage, here, after in zip(costs[:-1], tails[:-2], tails[1:-1], strict=True):
        at = int(np.argmax(join(stage[at], after) <= here[at] / NEXT))
        cuts.append(at)
    return tuple(cuts)
