"""Ranks that take turns at a stage, from a model to its plan, and what is refused on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe import Plan
from autopipe.errors import AutopipeError, InfeasibleError, PlanError
from tests.support.inprocess import machine

pytestmark = pytest.mark.usefixtures("traces_remembered")


class Lopsided(nn.Module):
    """x [b, 256] -> a loss; the second product takes twice as long as the first, and cannot be
    cut."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(256, 512)
        self.norm = nn.BatchNorm1d(512) if norm else nn.Identity()
        self.second = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x))).square().mean()


def inputs(rows: int) -> dict[str, Tensor]:
    return {"x": torch.ones(rows, 256)}


def normed() -> nn.Module:
    return Lopsided(norm=True)


def planned(model: Callable[[], nn.Module] = Lopsided, **asked: Any) -> Plan:
    few: dict[str, Any] = {"dp": 1, "tp": 1, "micro_batches": 16, "schedule": "1f1b"}
    return autopipe.plan(model, inputs, cluster=machine(3), batch_size=4096, **{**few, **asked})


def test_the_planner_gives_the_longer_stage_two_ranks() -> None:
    chosen, alone = planned(), planned(turns="off")
    assert chosen.turns == (1, 2)
    assert [stage.first for stage in chosen.stages] == [
        "first/linear/0",
        "second/linear/0",
        "second/linear/0",
    ]
    assert alone.turns == ()
    assert chosen.prediction.step_seconds < 0.8 * alone.prediction.step_seconds


def test_what_a_plan_says_is_what_was_asked_for() -> None:
    for asked in ("2,1", (2, 1)):
        plan = planned(turns=asked)
        assert plan.turns == (2, 1)


def test_running_statistics_take_no_turns() -> None:
    """Each rank would have its own: asked for it is refused, and by itself no plan has any."""
    with pytest.raises(PlanError, match=r"forward writes 'norm\..*' \(at .*\), and of ranks that"):
        planned(normed, turns=(1, 2))
    assert planned(normed).turns == ()


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ({"turns": "1,x"}, AutopipeError, "turns is '1,x'"),
        ({"turns": (1, 0)}, AutopipeError, r"turns is \(1, 0\)"),
        ({"turns": (1, 2), "zero": 3}, InfeasibleError, "zero=3"),
        ({"turns": (1, 2), "schedule": "gpipe"}, InfeasibleError, "the schedule gpipe"),
        (
            {"turns": (1, 2), "loss_over": "batch"},
            AutopipeError,
            "a loss over the whole batch|rows",
        ),
    ],
)
def test_what_contradicts_turns(
    asked: dict[str, Any], kind: type[AutopipeError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        planned(**asked)
