"""Tracing patches torch, transformers and Python for a while: afterwards all of it is as before."""

import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

import autopipe
from tests.support.inprocess import machine
from tests.support.zoo import ZOO

CASE = ZOO["llama"]
CASE.model()  # a first model makes transformers add what it keeps on nn.Module

CLASSES = (
    *(nn.Module, nn.Parameter, torch.Tensor, FakeTensor, torch.autograd.Function),
    *(saved_tensors_hooks, transformers.PreTrainedModel, transformers.PretrainedConfig),
)


def state() -> dict[str, Any]:
    """All that may have been changed, by name."""
    libraries = [torch.nn.init, torch.nn.modules.module]
    libraries += [m for name, m in sys.modules.items() if name.startswith("transformers.")]
    found: dict[str, Any] = {
        "warnings.filters": list(warnings.filters),
        "warnings.showwarning": warnings.showwarning,
        "sys.path": list(sys.path),
        "sys.excepthook": sys.excepthook,
        "os.environ": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
    }
    for kind in CLASSES:
        found |= {f"{kind.__name__}.{name}": value for name, value in vars(kind).items()}
    for module in libraries:
        for name, value in vars(module).items():
            if callable(value):
                found[f"{module.__name__}.{name}"] = value
    # torch's tables of hooks that are called for every module.
    for name, value in vars(torch.nn.modules.module).items():
        if name.endswith("hooks"):
            found[f"torch.nn.modules.module.{name}"] = dict(value)
    return found


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = state()
    yield
    after = state()
    changed = {name for name in before if after.get(name, None) is not before[name]}
    assert {name for name in changed if after.get(name) != before[name]} == set()
    known = {name for name in after if name.split(".")[0] in {kind.__name__ for kind in CLASSES}}
    assert known <= set(before), "a class has an attribute that it did not have"


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Refused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Custom.apply(self.layer(x), self.layer).mean()  # type: ignore[no-untyped-call, no-any-return]


def planned() -> autopipe.Plan:
    return autopipe.plan(
        CASE.model, cluster=machine(1), inputs=CASE.inputs, loss=CASE.loss, batch_size=4
    )


def test_after_a_plan_and_a_run() -> None:
    pipe = autopipe.parallelize(CASE.model, planned(), loss=CASE.loss)
    pipe.step(CASE.inputs(4))


def test_after_a_model_that_cannot_be_captured() -> None:
    with pytest.raises(autopipe.CaptureError, match="incorrect number of gradients"):
        autopipe.plan(
            Refused,
            cluster=machine(1),
            inputs=lambda rows: {"x": torch.ones(rows, 3)},
            batch_size=4,
        )


def test_after_a_constructor_that_raises() -> None:
    def model() -> nn.Module:
        nn.Linear(3, 3)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        autopipe.plan(model, cluster=machine(1), inputs=CASE.inputs, batch_size=4)


@pytest.mark.long
def test_after_a_plan_for_another_model() -> None:
    plan = planned()
    with pytest.raises(autopipe.PlanError):
        autopipe.parallelize(ZOO["gpt2"].model, plan, inputs=CASE.inputs, loss=CASE.loss)


def test_the_check_sees_a_patch() -> None:
    before = state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "__setattr__", object.__setattr__)
        assert state() != before
    assert state() == before
