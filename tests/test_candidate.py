"""Tensor-parallel degrees that cannot win: told by their bounds, without a run for their bytes."""

from __future__ import annotations

import os

import pytest

import autopipe
from autopipe import profile as module
from autopipe.aside import WORTH_SECONDS
from autopipe.planners.answer import TOLERANCE
from autopipe.profile import Costing, Profiled
from tests.inprocess import machine
from tests.zoo import ZOO


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


def test_bytes_looked_into_aside_are_those_looked_into_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While other degrees are sharded, a copy of the process runs the first one for its bytes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    case = ZOO["gpt"]
    looked: list[tuple[int, bool]] = []
    profiled = Costing.profiled

    def noting(self: Costing, *, check: bool = True) -> Profiled:
        looked.append((self.tp, check))
        return profiled(self, check=check)

    def plan() -> autopipe.Plan:
        looked.clear()
        return autopipe.plan(
            case.model, case.inputs, loss=case.loss, cluster="1x4xA100-40GB", batch_size=8
        )

    monkeypatch.setattr(Costing, "profiled", noting)
    monkeypatch.setattr(module, "SECONDS_A_NODE", WORTH_SECONDS)
    aside, told = plan(), [*looked]
    monkeypatch.setattr(module, "SECONDS_A_NODE", 0.0)
    assert plan() == aside
    assert told == looked[1:], "the first one's were looked into here"
