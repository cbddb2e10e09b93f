"""Equal shares of blocks: what Megatron-LM does, and the baseline for the others.

    blocks   0 1 2 3 4 5 6 over 3 stages  ->  0 1 2 | 3 4 | 5 6

The first stages get one block more if they do not divide (in Narayanan et al., SC21, section 2.2,
they do). Units before the first block stay with the first stage, units after the last
block with the last one, units between two blocks with the earlier one. A model with fewer blocks
than stages is cut by its number of units instead. No cost is looked at for the cuts; mesh,
micro-batches and schedule are the fastest that fit by the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.planners.model.estimate import Mesh, settle
from autopipe.planners.model.places import stages_of
from autopipe.planners.model.problem import Config, Decision, Problem
from autopipe.planners.search.best import Answer, best_answer


def uniform(problem: Problem, incumbents: Sequence[float] = (), mesh: Mesh | None = None) -> Answer:
    """Plan by equal shares of blocks.

    Raises:
        InfeasibleError: no mesh and number of micro-batches fits with such cuts.
    """
    return best_answer(problem, _choose, incumbents=incumbents, mesh=mesh, heuristic="uniform")


def _choose(problem: Problem, config: Config) -> Decision:
    cuts = even_cuts(problem, stages_of(problem, config))
    return settle(problem, config, cuts, tuple(range(config.pp)))


def even_cuts(problem: Problem, stages: int) -> tuple[int, ...]:
    """The cuts between so many equal shares, in units; there are at least as many units."""
    if len(problem.blocks) >= stages:
        starts = [first for first, _ in problem.blocks]
    else:
        starts = list(range(problem.units))
    share, larger = divmod(len(starts), stages)
    return tuple(starts[stage * share + min(stage, larger)] for stage in range(1, stages))
