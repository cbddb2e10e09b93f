"""Equal shares of blocks: what Megatron-LM does, and the baseline for the others.

    6 blocks over 3 stages   e 0 1 | 2 3 | 4 5 h            e, h: units before and after the blocks
    7 blocks over 3 stages   e 0 1 | 2 3 4 | 5 6 h          e and h as a block each: 9 over 3
    8 blocks over 3 stages   e 0 1 2 | 3 4 5 | 6 7 h        neither divides

Where the number of blocks does not divide (in Narayanan et al., SC21, section 2.2, it does), what
stands before and after them counts as a block each, if that divides: so do Megatron-LM's
`--account-for-embedding-in-pipeline-split` and `--account-for-loss-in-pipeline-split`, DeepSpeed's
`type:transformer|embedding`, and Llama 3, whose first and last stage have one layer less
(Grattafiori et al., 2024, section 3.3.2). Else the first stages get one block more.
Units between two blocks stay with the earlier one. A model with fewer blocks than stages is cut
into equal numbers of units. Costs play no part in the cuts; mesh, micro-batches and schedule are
the fastest that fit by the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.planners.model.estimate import PipelineDegrees, settle
from autopipe.planners.model.places import stages_of
from autopipe.planners.model.problem import Config, Decision, Problem
from autopipe.planners.search.best import Answer, Known, best_answer


def uniform(
    problem: Problem,
    incumbents: Sequence[float] = (),
    mesh: PipelineDegrees | None = None,
    known: Known | None = None,
) -> Answer:
    """Plan by equal shares of blocks.

    Raises:
        InfeasibleError: no mesh and number of micro-batches fits with such cuts.
    """
    return best_answer(
        problem, _choose, incumbents=incumbents, mesh=mesh, known=known, heuristic="uniform"
    )


def _choose(problem: Problem, config: Config) -> Decision:
    cuts = even_cuts(problem, stages_of(problem, config))
    return settle(problem, config, cuts, tuple(range(config.pp)))


def even_cuts(problem: Problem, stages: int) -> tuple[int, ...]:
    """The cuts, in units, between equal shares; there are at least as many units as shares."""
    starts = _first_units(problem, stages)
    share, larger = divmod(len(starts), stages)
    return tuple(starts[stage * share + min(stage, larger)] for stage in range(1, stages))


def _first_units(problem: Problem, stages: int) -> list[int]:
    """The first units of what the stages share out evenly.

    These are the blocks, with what stands before and after them if they divide only so; all units
    where blocks are fewer than stages.
    """
    starts = [first for first, _ in problem.repeated]
    if starts and len(starts) % stages:
        end = problem.repeated[-1][1]
        if starts[0] > 0 and end < problem.units and (len(starts) + 2) % stages == 0:
            return [0, *starts, end]
    return starts if len(starts) >= stages else [*range(problem.units)]
