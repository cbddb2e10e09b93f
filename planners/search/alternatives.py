"""The alternatives of a best decision: one line for each other mesh, with the reason it lost.

pp=4 dp=2   1.31 s   31 % slower, by the bubble          it fits, and its step is known
pp=8 dp=1   -        at least 52 % slower, by its bound  its cuts were never tried
pp=1 dp=8   -        stage 0 needs 83.1 of 80.0 GiB      it does not fit
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopipe.planfile.parts import Alternative
from autopipe.planners.model.estimate import PipelineDegrees, Scored
from autopipe.planners.model.problem import Config, Problem
from autopipe.planners.search import reasons


def by_mesh(scored: Mapping[Config, Scored]) -> dict[PipelineDegrees, Scored]:
    """For each mesh the fastest decision that fits; if none fits, the one nearest to fitting."""

    def order(found: Scored) -> tuple[float, float]:
        return found.estimate.overflow, found.estimate.step_seconds

    found: dict[PipelineDegrees, Scored] = {}
    for one in scored.values():
        known = found.get(one.mesh)
        if known is None or order(one) < order(known):
            found[one.mesh] = one
    return found


def alternatives_of(
    problem: Problem,
    best: Scored,
    scored: Mapping[Config, Scored],
    untried: Mapping[Config, float],
) -> tuple[Alternative, ...]:
    """One alternative for each mesh but the best one's. If a config of the mesh was not tried, and
    could be faster than those that were, the alternative has its bound."""
    rest = [found for mesh, found in by_mesh(scored).items() if mesh != best.mesh]
    fitting = {found.mesh: found for found in rest if found.estimate.fits}
    quicker: dict[PipelineDegrees, Config] = {}
    for config, seconds in untried.items():
        mesh = config[:2]
        known = fitting[mesh].estimate.step_seconds if mesh in fitting else math.inf
        if mesh != best.mesh and seconds < known:
            if mesh not in quicker or seconds < untried[quicker[mesh]]:
                quicker[mesh] = config
    exact = [found for mesh, found in fitting.items() if mesh not in quicker]
    steps = sorted(exact, key=lambda found: found.estimate.step_seconds)
    misfits = [f for f in rest if f.mesh not in fitting and f.mesh not in quicker]
    return (
        *(alternative(problem.tp, best, found) for found in steps),
        *(
            bounded(problem.tp, best, config, untried[config])
            for config in sorted(quicker.values(), key=lambda config: untried[config])
        ),
        *(
            alternative(problem.tp, best, found)
            for found in sorted(misfits, key=lambda found: found.estimate.overflow)
        ),
    )


def alternative(tp: int, best: Scored, other: Scored) -> Alternative:
    """The alternative for a decision, compared with the best one."""
    config, found = other.decision.config, other.estimate
    if not found.fits:
        return _of(tp, config, None, None, reasons.misfit(found))
    slower = _slower(best, found.step_seconds)
    return _of(tp, config, found.step_seconds, slower, reasons.cause(best.estimate, found))


def bounded(tp: int, best: Scored, config: Config, least: float) -> Alternative:
    """The alternative for a mesh that was not tried, since even its bound is too slow."""
    return _of(tp, config, None, _slower(best, least), "by its bound")


def _of(
    tp: int, config: Config, step_seconds: float | None, slower: float | None, cause: str
) -> Alternative:
    return Alternative(
        pp=config.pp,
        dp=config.dp,
        tp=tp,
        micro_batches=config.micro_batches,
        schedule=config.schedule,
        step_seconds=step_seconds,
        slower=slower,
        cause=cause,
        zero=config.zero,
    )


def _slower(best: Scored, step_seconds: float) -> float:
    """By which share another step is longer than the best one."""
    least = best.estimate.step_seconds
    return step_seconds / least - 1 if least else 0.0
