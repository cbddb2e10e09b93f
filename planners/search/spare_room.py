"""Recompute less where a rank of several stages has room that none of its stages has alone.

The planners give each of a rank's stages an equal share of its memory, so a stage of one block
recomputes it or not. What the stages leave of their shares, added up, may hold a block:

    rank 3    stage 3 | stage 19 | stage 35 | stage 51        limit 40 GiB, shares of 10
    before    A again   A again    A again    A again         4 x 6 GiB held
    after     A again   A again    A kept     A kept          2 x 6 + 2 x 13 GiB held
"""

from __future__ import annotations

from dataclasses import replace

from autopipe.planners.model.estimate import estimate
from autopipe.planners.model.problem import Decision, Problem


def filled(problem: Problem, decision: Decision) -> Decision:
    """The decision with fewer stages that recompute, as they fit.

    Later stages come first: they have fewer micro-batches in flight, so they hold less.

    What recomputes by a constraint does so here.
    """
    several = decision.stages > decision.config.pp
    if not several or problem.constraints.recompute is not None:
        return decision
    for stage in reversed(range(decision.stages)):
        if decision.recompute[stage]:
            kept = (*decision.recompute[:stage], (), *decision.recompute[stage + 1 :])
            fewer = replace(decision, recompute=kept)
            if estimate(problem, fewer).fits:
                decision = fewer
    return decision
