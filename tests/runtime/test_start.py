"""The start of a rank reads each fact off the plan once, and passes it on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import ModelError
from autopipe.ir.fingerprint import fingerprint
from autopipe.planfile import programs
from autopipe.runtime import start
from autopipe.schedules.instructions import holders
from autopipe.sharding import plan_io
from autopipe.stages import bind
from tests.support.inprocess import machine
from tests.support.pipes import ZOO, piped, planned


def test_each_fact_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("gpt", 1, 1, 2)
    calls: Counter[str] = Counter()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[function.__name__] += 1
            return function(*args, **options)

        return call

    monkeypatch.setattr(programs, "compute", counted(programs.compute))
    for module in (start, bind):
        monkeypatch.setattr(module, "read_back", counted(plan_io.read_back))
    monkeypatch.setattr(start, "holders", counted(holders))
    pipe = piped("gpt", plan)
    pipe.step(ZOO["gpt"].inputs(4))
    assert calls == {"compute": 1, "read_back": 1, "holders": 1}


@pytest.mark.parametrize(("bound", "used"), [("cpu", []), ("cuda:2", [2])])
def test_only_a_rank_on_a_gpu_uses_one(
    bound: str, used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan for the processor leaves the GPUs of its machine alone."""
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(device.index))
    plan = planned("gpt", 1, 1, 2)
    place = replace(plan.mesh.places[0], device=bound, local=2)
    joined = start.join(replace(plan, mesh=replace(plan.mesh, places=(place,))))
    assert (found, joined.device) == (used, torch.device(bound))


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

    def off(self, result: torch.Tensor) -> torch.Tensor:
        return (result - self.y).square().mean()


class OfPairs(nn.Linear):
    def forward(self, pair: Pair) -> torch.Tensor:
        return super().forward(pair.x)


def pairs(rows: int) -> tuple[Pair]:
    return (Pair(torch.randn(rows, 4), torch.randn(rows, 4)),)


def off(result: torch.Tensor, batch: tuple[Pair]) -> torch.Tensor:
    return batch[0].off(result)


def test_containers_of_a_users_classes_are_asked_for() -> None:
    """A plan has a named tuple's names, and not its methods."""

    def model() -> nn.Module:
        return OfPairs(4, 4)

    plan = autopipe.plan(
        model, pairs, loss=off, cluster=machine(1), batch_size=4, micro_batches=1, precision="fp32"
    )
    traced = start.trace_planned(model, pairs, off, plan)
    assert [spec.within for spec in plan.inputs] == [("tuple", "named x y")] * 2
    with pytest.raises(ModelError, match="'Batch' object has no attribute 'off'") as refused:
        start.trace_planned(model, None, off, plan)
    assert "parallelize(model, plan, inputs=batch)" in str(refused.value.hint)
    assert type(traced.example[0]) is Pair


def test_an_example_of_shorter_rows_is_as_good() -> None:
    """Bug: a batch of a loader's, given to trace with, was said to be of another model."""
    plan, case = planned("gpt", 1, 1, 2), ZOO["gpt"]
    batch = case.inputs(4)
    short = {key: entry[:, :8] if entry.ndim > 1 else entry for key, entry in batch.items()}
    traced = start.trace_planned(case.model, short, case.loss, plan)
    assert fingerprint(traced.trace.graph) == plan.fingerprint
    assert traced.example["tokens"].shape[1] == batch["tokens"].shape[1]


def test_a_checked_plan_says_where_stages_stand() -> None:
    plan, loss = planned("gpt", 2, 1, 4, "zb-v"), ZOO["gpt"].loss
    checked = start.check_plan(plan, loss, None)
    assert checked.placed == (0, 1, 1, 0)
    assert checked.compute == programs.compute(plan)
    assert checked.sharding.ranks == 1 and checked.emitted is None
