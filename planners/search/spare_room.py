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
from autopipe.planners.model.places import ranks_of
from autopipe.planners.model.problem import Decision, Problem


def filled(problem: Problem, decision: Decision) -> Decision:
    """The decision with fewer stages that recompute or offload, as they fit.

    Later stages come first: they have fewer micro-batches in flight, so they hold less. Blocks that
    a constraint makes run again still do.
    """
    asked = problem.constraints
    fixed = asked.recompute is not None or bool(asked.offload)
    if decision.stages <= decision.config.pp or fixed:
        return decision
    # A stage's bytes do not depend on other stages, so two estimates have all choices.
    before = estimate(problem, decision)
    if not before.fits:
        return decision
    without = estimate(problem, replace(decision, recompute=(), offload=()))
    beyond, recompute = list(before.beyond), list(decision.recompute)
    offload = list(decision.offload) or [()] * decision.stages
    for stage, rank in reversed([*enumerate(ranks_of(problem, decision.config))]):
        extra = without.stages[stage].memory.peak - before.stages[stage].memory.peak
        keeps_less = recompute[stage] or offload[stage]
        if keeps_less and beyond[rank] + extra <= 0:
            beyond[rank] += extra
            recompute[stage], offload[stage] = (), ()
    return replace(decision, recompute=tuple(recompute), offload=tuple(offload))
