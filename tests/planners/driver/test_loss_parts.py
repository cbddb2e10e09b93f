"""The loss whole or in parts: asked for, or chosen where logits are large and memory matters."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe
from autopipe import AutopipeError, InfeasibleError, Plan
from autopipe.planners.driver import choose, loss_parts
from autopipe.planners.driver.choose import Chosen, Searched
from autopipe.planners.driver.request import Job
from autopipe.planners.search.best import Outdone
from autopipe.report import facts
from autopipe.util.stopwatch import Stopwatch
from tests.support.inprocess import machine

pytestmark = pytest.mark.usefixtures("traces_remembered")

MIB = 2**20
WORDS, LENGTH, FEW = 50_000, 344, 16


class Words(nn.Module):
    """Few weights and large logits: 66 MiB in fp32 of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embedding(tokens))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def inputs(rows: int) -> dict[str, Tensor]:
    tokens = torch.zeros(rows, LENGTH, dtype=torch.long)
    return {"tokens": tokens, "labels": tokens}


def few(rows: int) -> dict[str, Tensor]:
    """Rows of fewer tokens, where memory does not matter: the model is run to compare its graph."""
    return {name: tensor[:, :FEW] for name, tensor in inputs(rows).items()}


def planned(inputs: Any = inputs, **options: Any) -> Plan:
    return autopipe.plan(Words, inputs, batch_size=4, **{"cluster": machine(1), **options})


@pytest.mark.long
def test_a_loss_stays_whole_where_memory_does_not_matter() -> None:
    assert planned().loss_parts == 0


@pytest.mark.long
def test_a_loss_in_parts_where_nothing_fits_otherwise() -> None:
    """50,000 words are seven parts of 8192; the plan says so, and holds no logits."""
    said: list[str] = []
    plan = planned(memory="70MiB", say=said.append)
    assert plan.loss_parts == 7
    assert "loss: in 7 parts of the vocabulary; nothing fits with it whole" in said
    assert dict(facts.decided(plan))["loss"].startswith("from 7 parts of the vocabulary")
    assert plan.stages[0].predicted.memory.activations < MIB
    with pytest.raises(InfeasibleError):
        planned(memory="70MiB", loss_parts="off")
    with pytest.raises(InfeasibleError):
        planned(memory="8MiB")


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(("asked", "parts"), [("3", 3), (3, 3), (0, 0)])
def test_so_many_parts_as_asked_for(asked: int | str, parts: int) -> None:
    """The plan is of the same model: its fingerprint is that of the graph as traced."""
    plan = planned(few, loss_parts=asked)
    assert plan.loss_parts == parts
    assert plan.fingerprint == planned(few, loss_parts="off").fingerprint
    whole = 4 * FEW * WORDS
    held = plan.stages[0].predicted.memory.activations
    assert (held > whole) == (parts == 0)


def test_what_is_no_number_of_parts_and_a_loss_without_logits_are_refused() -> None:
    with pytest.raises(AutopipeError, match="loss_parts is 'many'"):
        planned(loss_parts="many")
    with pytest.raises(AutopipeError, match="no cross-entropy of a product"):
        autopipe.plan(
            lambda: nn.Linear(8, 8),
            lambda rows: {"input": torch.ones(rows, 8)},
            loss=lambda outputs, batch: outputs.square().mean(),
            cluster=machine(1),
            batch_size=4,
            loss_parts=2,
        )


@cache
def job(devices: int = 1) -> tuple[Job, Plan]:
    """What the driver is given to choose for, and a plan of it."""
    found: list[Job] = []

    def note(job: Job, watch: Any) -> Chosen:
        found.append(job)
        return best(job, watch)

    best = loss_parts.best_of_engines
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_parts, "best_of_engines", note)
        plan = planned(cluster=machine(devices))
    return found[0], plan


def taking(plan: Plan, seconds: float) -> Plan:
    return replace(plan, prediction=replace(plan.prediction, step_seconds=seconds))


def recomputing(plan: Plan) -> Plan:
    return replace(plan, stages=(replace(plan.stages[0], recompute=("a block",)),))


@pytest.mark.parametrize(
    ("change", "seconds", "parts"),
    [
        (recomputing, {0: 2.0, 7: 1.9}, 7),
        (recomputing, {0: 2.0, 7: 2.0}, 0),
        (recomputing, {0: 2.0}, 0),
        (lambda plan: plan, {0: 2.0, 7: 1.9}, 0),
    ],
    ids=["faster in parts", "as fast whole", "parts fit nowhere", "memory does not matter"],
)
def test_the_faster_one_is_taken_where_memory_matters(
    change: Callable[[Plan], Plan],
    seconds: dict[int, float],
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, plan = job()

    def best(job: Job, watch: Any, rival: Chosen | None = None) -> Chosen:
        own = job.traced.loss_parts
        if own not in seconds:
            raise InfeasibleError("nothing fits")
        found = replace(taking(change(plan), seconds[own]), loss_parts=own)
        return Chosen(found, Searched({}, {}, {}))

    monkeypatch.setattr(loss_parts, "best_plan", best)
    monkeypatch.setattr(loss_parts, "best_of_engines", best)
    found = loss_parts.best_loss(asked, None, lambda line: None)  # type: ignore[arg-type]
    assert found.loss_parts == parts


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
def test_of_a_rival_that_is_as_fast_no_plan_is_written(
    times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is faster than its rival is planned as without one, beside other meshes of the degrees
    that its rival has not outdone."""
    asked, _ = job(devices=2)
    eager = asked.on_engine(compiled=False)
    alone = choose.best_plan(eager, Stopwatch())
    own = alone.plan.planner
    note = replace(own, step_seconds=times * own.step_seconds)
    rival = Chosen(replace(alone.plan, planner=note), alone.search)
    if times > 1:
        found = choose.best_plan(eager, Stopwatch(), rival).plan
        beside = [found.planner.next_best, *found.planner.others]
        assert beside == [mesh for mesh in [own.next_best, *own.others] if mesh and mesh.tp == 1]
        assert replace(found, planner=own) == alone.plan
        return
    monkeypatch.delattr(choose, "plan_that_fits")
    with pytest.raises(Outdone):
        choose.best_plan(eager, Stopwatch(), rival)
