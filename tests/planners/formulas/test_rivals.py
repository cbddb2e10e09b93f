"""The plans beside a plan, of a problem without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import pytest

from autopipe.cluster.cluster import Link
from autopipe.planfile.contents import Plan
from autopipe.planners.formulas import rivals
from autopipe.planners.model.estimate import PipelineDegrees
from autopipe.planners.model.problem import Constraints, Problem
from autopipe.planners.search.best import Answer, Known
from autopipe.planners.search.registry import PLANNERS
from tests.support.plans import example_plan
from tests.support.problems import line


@dataclass
class Searching:
    """A candidate that has a problem and remembers what was found, and no model."""

    problem: Problem
    known: Known = field(default_factory=dict)

    def counted(self) -> Searching:
        return self

    def search(self, problem: Problem, steps: Sequence[float], mesh: PipelineDegrees) -> Answer:
        return PLANNERS["dynamic"](problem, steps, mesh, self.known)


NUMBERS = count()


def written(candidate: Searching, answer: Answer, mesh: PipelineDegrees | None = None) -> Plan:
    """A plan that differs from all others, with the decision's mesh in words."""
    own, (pp, dp, *_) = example_plan(), answer.decision.config
    note = replace(own.planner, binding=f"pp={pp} dp={dp}")
    return replace(own, planner=note, schedule=str(next(NUMBERS)))


def test_each_is_searched_for_its_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what had been found on the devices that there are was taken for what is best on others;
    and a slower link still summed as fast as it had been measured to.

    Four units of 400 bytes of states on two devices; replicas sum 400 bytes in 0.4 seconds.

    replicas    8 + 0.4 s    1640 bytes          stages    10 s    840 bytes
    half the memory          1500 bytes          an eighth of the link          8 + 3.2 s
    """
    problem = line(
        (1.0,) * 4,
        memory=3000,
        link=Link(0.0, 1e4, summing=1000.0, gathering=1000.0),
        constraints=Constraints(schedule="1f1b"),
    )
    monkeypatch.setattr(rivals, "job_of", lambda *asked: None)
    monkeypatch.setattr(rivals, "candidate_at", lambda *asked: Searching(problem))
    monkeypatch.setattr(rivals, "plan_that_fits", written)
    # The file and the trace are for the search, which is replaced.
    found = rivals.rivals(example_plan(), None, None, 4, lambda line: None)  # type: ignore[arg-type]
    assert [plan.planner.binding for plan in found] == [
        "pp=1 dp=2",
        "pp=1 dp=1",
        "found for devices with 1/2 of the memory, where: pp=2 dp=1",
        "found for a farthest link of 1/8 of the bandwidth, where: pp=2 dp=1",
    ]
