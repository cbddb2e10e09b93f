"""Tensor-parallel degrees that cannot win: told by their bounds, without a run for their bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

import autopipe
from autopipe.errors import InfeasibleError
from autopipe.planners.costs.profile import Costing, Profiled
from autopipe.planners.driver.candidate import Candidate
from autopipe.planners.search.best import Answer
from autopipe.planners.search.descent import TOLERANCE
from tests.support.inprocess import machine
from tests.support.zoo import ZOO

pytestmark = pytest.mark.usefixtures("traces_remembered")


@pytest.mark.long
def test_bytes_are_looked_into_where_they_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """On links of 0.1 ms a rank of tp=2 or tp=4 waits longer than a whole step takes at tp=1. Their
    seconds say so; what they keep for backward nobody has asked."""
    looked: list[tuple[int, bool]] = []
    profiled = Costing.profiled

    def noting(self: Costing, *, check: bool = True) -> Profiled:
        looked.append((self.tp, check))
        return profiled(self, check=check)

    monkeypatch.setattr(Costing, "profiled", noting)
    case = ZOO["gpt"]
    plan = autopipe.plan(case.model, case.inputs, loss=case.loss, cluster=machine(4), batch_size=8)
    assert looked == [(1, True)]
    told = [other for other in plan.planner.alternatives if other.tp > 1]
    assert {other.tp for other in told} == {2, 4}
    for other in told:
        assert other.step_seconds is None and other.why.endswith("slower, by its bound")
    assert plan.planner.step_seconds <= plan.planner.bound_seconds * (1 + TOLERANCE)


@pytest.mark.long
def test_bytes_of_other_micro_batches_are_for_a_refusal_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4 micro-batches of 8 rows are 2 rows each. Where nothing fits, all sizes are looked at."""
    counted: list[Sequence[int]] = []
    profiled = Costing.profiled

    def noting(self: Costing, *, check: bool = True) -> Profiled:
        counted.append(self.rows)
        return profiled(self, check=check)

    monkeypatch.setattr(Costing, "profiled", noting)
    case = ZOO["gpt"]
    asked = partial(autopipe.plan, case.model, case.inputs, loss=case.loss, batch_size=8)
    asked(cluster=machine(2), pp=2, dp=1, tp=1, micro_batches=4)
    assert counted == [[2]]
    with pytest.raises(InfeasibleError):
        asked(cluster=machine(2), pp=2, dp=1, tp=1, micro_batches=4, memory=1000)
    assert counted[-1] == [1, 2, 4, 8]


def test_the_phases_pass_values_that_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was asked, what was traced and what a degree costs: no graph, no batch."""
    printed: dict[str, list[str]] = {"job": [], "candidate": []}
    search = Candidate.search

    def noting(self: Candidate, *args: Any) -> Answer:
        printed["job"].append(repr(self.job))
        printed["candidate"].append(str(self))
        return search(self, *args)

    monkeypatch.setattr(Candidate, "search", noting)
    case = ZOO["gpt"]
    autopipe.plan(case.model, case.inputs, loss=case.loss, cluster=machine(4), batch_size=8)
    (job,), (candidate,) = printed.values()
    assert "precision='fp32'" in job and "rows=8" in job and "path='blocks.3'" in job
    assert len(job) < 3000
    assert re.fullmatch(
        r"tp=1: \d+ units, micro-batches of 1 to 8 rows on 4 tensor-parallel groups", candidate
    )


def test_seconds_do_not_change_when_bytes_come() -> None:
    """What a bound was taken from is what is searched."""
    costings: list[tuple[Costing, Profiled]] = []
    profiled = Costing.profiled

    def noting(self: Costing, *, check: bool = True) -> Profiled:
        costings.append((self, profiled(self, check=check)))
        return costings[-1][1]

    case = ZOO["gpt"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Costing, "profiled", noting)
        autopipe.plan(case.model, case.inputs, loss=case.loss, cluster=machine(2), batch_size=8)
    ((costing, found), *_) = costings
    for timed, whole in zip(costing.timed.profiles, found.problem.profiles, strict=True):
        assert (timed.forward, timed.backward) == (whole.forward, whole.backward)
        assert not timed.saved and whole.saved
