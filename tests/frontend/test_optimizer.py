"""An optimizer made for a rank's parameters treats them as one made for all parameters does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from autopipe.errors import ModelError
from autopipe.frontend.optimizer import (
    Named,
    refuse_other_schedules,
    refuse_others,
    update,
)

WHOLE = {
    name: (shape, torch.float32) for name, shape in {"a": (3, 4), "b": (4,), "c": (2,)}.items()
}


def of_rank(*names: str) -> list[Named]:
    return [(name, nn.Parameter(torch.zeros(WHOLE[name][0]))) for name in names]


def check(make: Any, *names: str) -> None:
    named = of_rank(*names)
    refuse_others(make, WHOLE, make(named), named)


def first_is_slow(named: Iterable[Named]) -> torch.optim.Optimizer:
    (_, first), *rest = named
    groups = [{"params": [first], "lr": 0.01}, {"params": [p for _, p in rest]}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1)


def without_the_first(named: Iterable[Named]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named][1:], lr=0.1)


def by_dims(named: Iterable[Named]) -> torch.optim.Optimizer:
    groups = [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for _, p in named]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def by_values(named: Iterable[Named]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": p.sum().item() + 1} for _, p in named])


def test_by_the_places_of_parameters() -> None:
    """Bug: each rank gave its own first parameter what is for that of the model."""
    check(first_is_slow, "a", "b")
    with pytest.raises(ModelError) as refused:
        check(first_is_slow, "b", "c")
    assert refused.value.message == (
        "optimizer(parameters) gives 'b' lr=0.1 among all of the model's, and lr=0.01 among those "
        "of this rank"
    )
    assert "def optimizer(named_parameters)" in str(refused.value.hint)


def test_one_that_leaves_parameters_out() -> None:
    check(without_the_first, "a", "c")
    with pytest.raises(ModelError, match="gives 'b' lr=0.1, .* and no group among those of this"):
        check(without_the_first, "b", "c")


@pytest.mark.parametrize("make", [by_dims, by_values])
def test_by_what_a_parameter_is(make: Any) -> None:
    """By its values it cannot be asked without them."""
    check(make, "b", "c")


def test_parameters_from_elsewhere() -> None:
    """As of a model in a global, which the rank's own has set."""
    held = of_rank("b", "c")
    refuse_others(lambda _: first_is_slow(held), WHOLE, first_is_slow(held), held)


def test_copies_are_not_trained_from_elsewhere() -> None:
    """Bug: a tensor-parallel rank trained a part, and the optimizer had the model's own."""
    own = of_rank("a", "b", "c")
    with pytest.raises(ModelError, match="takes parameters from elsewhere, and has none of those"):
        refuse_others(lambda _: first_is_slow(own), WHOLE, first_is_slow(own), of_rank("b", "c"))


def test_a_rank_without_parameters() -> None:
    named = [("", nn.Parameter(torch.empty(0)))]
    refuse_others(first_is_slow, WHOLE, first_is_slow(named), named)


def in_order(named: Iterable[Named]) -> torch.optim.Optimizer:
    """A group for each parameter."""
    return torch.optim.SGD([{"params": [p]} for _, p in named], lr=0.1)


def in_all_groups(named: Iterable[Named]) -> torch.optim.Optimizer:
    """Groups that are made even where they are empty."""
    groups = ([p for name, p in named if name == each] for each in WHOLE)
    return torch.optim.SGD([{"params": group} for group in groups], lr=0.1)


def by_place(optimizer: torch.optim.Optimizer) -> Any:
    """The first group begins after 50 steps."""
    later = [lambda step: float(step >= 50), *[lambda _: 1.0] * (len(optimizer.param_groups) - 1)]
    return LambdaLR(optimizer, later)


def alike(optimizer: torch.optim.Optimizer) -> Any:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def ends(optimizer: torch.optim.Optimizer) -> Any:
    """One that raises after its last step."""
    return OneCycleLR(optimizer, 0.1, total_steps=4)


def test_schedules_by_the_places_of_groups() -> None:
    """Bug: the first group of each rank got the rates of the model's first one."""
    refuse_other_schedules(in_order, by_place, WHOLE, of_rank("a", "b"))
    refuse_other_schedules(in_order, alike, WHOLE, of_rank("b", "c"))
    refuse_other_schedules(in_order, ReduceLROnPlateau, WHOLE, of_rank("b", "c"))
    refuse_other_schedules(in_order, ends, WHOLE, of_rank("b", "c"))
    refuse_other_schedules(in_all_groups, by_place, WHOLE, of_rank("b", "c"))
    with pytest.raises(ModelError) as refused:
        refuse_other_schedules(in_order, by_place, WHOLE, of_rank("b", "c"))
    assert refused.value.message == (
        "scheduler(optimizer) gives 'b' lr=0.1 after 0 steps among all of the model's groups, and "
        "lr=0.0 among those of this rank, where its group has another place"
    )
    assert "empty ones too" in str(refused.value.hint)


class Noisy(torch.optim.SGD):
    """Sets each parameter to noise."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # SGD's has overloads
        for parameter in self.param_groups[0]["params"]:
            parameter.data.normal_()


def test_replicas_draw_the_same_noise() -> None:
    """Bug: each drew from where it was in its own random numbers, and replicas went apart."""
    one, other = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    update(Noisy([one], lr=0.1), 1)
    before = torch.rand(3)
    update(Noisy([other], lr=0.1), 1)
    assert one.equal(other)
    assert not torch.rand(3).equal(before), "other numbers go on"
    update(Noisy([other], lr=0.1), 2)
    assert not one.equal(other)


def test_a_step_that_fails_is_told_in_a_sentence() -> None:
    """Bug: an embedding made with sparse=True has a dense gradient here, and a run ended in a
    traceback."""
    (named,) = of_rank("a")
    named[1].grad = torch.zeros(3, 4)
    with pytest.raises(ModelError) as refused:
        update(torch.optim.SparseAdam([named[1]]), 0)
    assert refused.value.message.startswith("optimizer.step() ended in RuntimeError: SparseAdam")
    assert "Adam, not SparseAdam" in str(refused.value.hint)
    optimizer = torch.optim.SGD([named[1]], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: {}["rate"])
    with pytest.raises(ModelError, match=r"test_optimizer.py:\d+ .* ended in KeyError: 'rate'"):
        update(optimizer, 0)
