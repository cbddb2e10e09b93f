"""A hook on a gradient that would not be called, or too early, is refused before a step.

A rank's graphs make the gradient of `held`; its optimizer gets that or, under ZeRO, rows of it.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopipe import ModelError
from autopipe.planfile.contents import Plan
from autopipe.runtime.script.gradient_hooks import GradientHooks
from tests.support.plans import example_plan


def plan_of(micro_batches: int, dp: int) -> Plan:
    plan = example_plan()
    batch = replace(plan.batch, micro_batches=micro_batches)
    return replace(plan, batch=batch, mesh=replace(plan.mesh, dp=dp))


def hooks_of(
    rows: bool, micro_batches: int = 1, dp: int = 1
) -> tuple[GradientHooks, nn.Parameter, nn.Linear]:
    """Hooks of a rank, what its optimizer gets, and the module that was given."""
    model = nn.Linear(4, 4, bias=False)
    held = nn.Parameter(torch.ones(4, 4)) if rows else model.weight
    given = nn.Parameter(held.detach()[:2]) if rows else held
    held.register_post_accumulate_grad_hook(sums)  # type: ignore[no-untyped-call]
    plan = plan_of(micro_batches, dp)
    return GradientHooks(plan, model, {"weight": held}, {"weight": given}), given, model


def sums(parameter: torch.Tensor) -> None:
    """As of the package itself, to sum over replicas."""


sums.__module__ = "autopipe.runtime.parameters.gradient_sum"


@pytest.mark.parametrize("of_module", [False, True])
@pytest.mark.parametrize("accumulated", [False, True])
def test_a_hook_that_would_not_be_called(of_module: bool, accumulated: bool) -> None:
    hooks, given, model = hooks_of(rows=True)
    hooks.check()
    one = model.weight if of_module else given
    take = one.register_post_accumulate_grad_hook if accumulated else one.register_hook
    handle = take(lambda found: None)  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match="a hook on the gradient of 'weight' would never be call"):
        hooks.check()
    handle.remove()
    hooks.check()


@pytest.mark.parametrize(("micro_batches", "dp"), [(2, 1), (1, 2)])
def test_an_update_within_backward(micro_batches: int, dp: int) -> None:
    """It would be by a part of the gradient."""
    hooks, given, _ = hooks_of(False, micro_batches, dp)
    hooks.check()
    given.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
    hooks.check()
    given.register_post_accumulate_grad_hook(print)  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match="called after each micro-batch, and before replicas"):
        hooks.check()


def test_one_micro_batch_of_one_replica() -> None:
    hooks, given, _ = hooks_of(False)
    given.register_post_accumulate_grad_hook(print)  # type: ignore[no-untyped-call]
    hooks.check()
