"""A second optimizer like one of a script: its settings and attributes, other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from autopipe.frontend.measured_optimizer import ELEMENT, MODEL, TENSOR, stepped_apart
from autopipe.frontend.optimizer import ByName
from autopipe.runtime.script.again import NoOther, another


class Clipped(torch.optim.AdamW):
    """Clips gradients to a norm that is none of its groups' settings."""

    def __init__(self, parameters: Iterable[nn.Parameter], norm: float) -> None:
        super().__init__(parameters)
        self.norm, self.steps = norm, [0]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # AdamW's has overloads
        self.steps[0] += 1
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], self.norm)
        super().step(closure)


class Around(torch.optim.Optimizer):
    """Has another optimizer, whose groups are its own, and takes nothing but it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns a loss
        self.inner.step(closure)


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

MAKES: list[tuple[Make, str]] = [
    (lambda every: Clipped(every, 0.05), MODEL),
    (lambda every: Clipped(every, torch.inf), ELEMENT),
    (lambda every: Around(torch.optim.SGD(every, lr=0.1)), ELEMENT),
    (lambda every: Around(torch.optim.Adafactor(every)), TENSOR),
    (lambda every: Around(Clipped(every, 0.05)), MODEL),
]


@pytest.mark.parametrize(("make", "expected"), MAKES)
def test_what_an_optimizer_of_a_script_changes_together(make: Make, expected: str) -> None:
    """Bug: it was made anew from the defaults that it keeps, and where its class takes others, as
    AdamW's subclasses, Prodigy and schedule-free ones do, it was taken for Adam."""
    named = {f"{n}.weight": nn.Parameter(torch.ones(64, 64)) for n in range(2)}
    optimizer = make(named.values())
    StepLR(optimizer, 1)  # which wraps its step: the wrapper steps the first one

    def again(others: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return another(optimizer, {id(named[name]): one for name, one in others})

    assert stepped_apart(ByName(again), named) == expected
    assert all(bool((one == 1).all()) for one in named.values()), "it has made no step itself"
    assert not optimizer.state


class Lookahead(Around):
    """Keeps slow weights in lists beside the groups, and their moves by the parameter."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]
        self.moves = {p: torch.zeros_like(p) for g in self.param_groups for p in g["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns a loss
        super().step(closure)
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for fast, kept in zip(group["params"], slow, strict=True):
                self.moves[fast].add_(fast - kept)
                kept.lerp_(fast, 0.5)
                fast.copy_(kept)


def test_what_it_keeps_beside_its_parameters() -> None:
    """Bug: copies of the large ones stood beside the small ones, and its step failed."""
    named = {f"{n}.weight": nn.Parameter(torch.ones(64, 64)) for n in range(2)}
    optimizer = Lookahead(torch.optim.SGD(named.values(), lr=0.1))

    def again(others: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return another(optimizer, {id(named[name]): one for name, one in others})

    small = {"1.weight": nn.Parameter(torch.full((8, 8), 2.0))}
    made = again(small.items())
    assert isinstance(made, Lookahead)
    assert torch.equal(made.slow[0][0], small["1.weight"]) and len(made.slow[0]) == 1
    assert made.moves[small["1.weight"]].shape == (8, 8)
    assert stepped_apart(ByName(again), named) == ELEMENT
    optimizer.slow[0][0][0] = 3.0
    with pytest.raises(NoOther, match="a tensor for each parameter, with values of its own"):
        another(optimizer, {id(named["0.weight"]): small["1.weight"]})


def test_its_attributes_and_hooks() -> None:
    """Containers are copied, since a step may write them; hooks are left out."""
    first, second, other = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = Clipped([first, second], 0.05)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("of the first one"))
    optimizer.param_groups[0]["lr"] = 0.5
    made = another(optimizer, {id(second): other})
    other.grad = torch.ones(2)
    made.step()
    assert isinstance(made, Clipped) and made.norm == 0.05
    assert made.param_groups[0]["lr"] == 0.5
    assert [id(one) for one in made.param_groups[0]["params"]] == [id(other)]
    assert (made.steps, optimizer.steps) == ([1], [0])


def test_what_may_have_a_state_is_not_shared() -> None:
    """Steps of the second one would change it."""
    one = nn.Parameter(torch.ones(2))
    counting = Clipped([one], 0.05)
    means = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    counting.means = means  # type: ignore[attr-defined]  # a script's own
    with pytest.raises(NoOther, match="it has a AveragedModel, which may have a state"):
        another(counting, {id(one): one})
    patched = torch.optim.SGD([one], lr=0.1)
    # mypy lets nobody replace a method, or give a lambda the overloads of one.
    patched.step = lambda closure=None: None  # type: ignore[method-assign,assignment,misc]
    with pytest.raises(NoOther, match="its step was replaced"):
        another(patched, {id(one): one})
