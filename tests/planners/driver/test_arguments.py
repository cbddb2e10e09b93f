"""How `plan` reads its arguments, and which values it refuses."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from autopipe.cluster.cluster import Cluster
from autopipe.cluster.spec import LocalSpec, parse
from autopipe.errors import AutopipeError
from autopipe.frontend.measured_optimizer import (
    ELEMENT,
    MODEL,
    NOISE,
    TENSOR,
    measured_on,
    optimizer_factor,
    stepped_apart,
)
from autopipe.frontend.optimizer import MakeOptimizer, without_names
from autopipe.planners.driver.arguments import limits_of
from autopipe.planners.driver.request import PlanRequest, as_optimizer_allows, micro_batch_rows
from autopipe.planners.model.problem import Constraints
from tests.support.inprocess import machine


@pytest.mark.parametrize(
    ("text", "bytes"),
    [("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("1.5 KiB", 1536), ("512M", 512 * 10**6), (7, 7)],
)
def test_sizes(text: int | str, bytes: int) -> None:
    assert limits_of(text, machine(2)) == (bytes, bytes)


def test_a_limit_for_each_device() -> None:
    assert limits_of("80GB,40GB", machine(2)) == (80 * 10**9, 40 * 10**9)
    with pytest.raises(AutopipeError, match="3 limits were given for the 2 devices"):
        limits_of([1, 2, 3], machine(2))


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize(
    ("cluster", "fuses"),
    [
        (LocalSpec(2, cpu=True), (False, False)),
        (LocalSpec(1), (False, True)),
        (machine(2), (False, False)),
        (parse("2xA100-80GB"), (True, True)),
    ],
)
def test_attentions_are_fused_on_the_gpus_of_the_cluster(
    cluster: Cluster | LocalSpec,
    fuses: tuple[bool, bool],
    here: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the plan is made on a machine that has one says nothing of another one's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    request = PlanRequest(
        model=nn.Identity,
        inputs=None,
        loss=None,
        optimizer="sgd",
        precision="fp32",
        cluster=cluster,
        batch_size=None,
        constraints=Constraints(),
        planner="dynamic",
        sequence_parallel=True,
        loss_over="rows",
    )
    assert request.may_fuse == fuses[here]


def test_micro_batches_have_rows_that_some_mesh_divides_the_batch_into() -> None:
    assert micro_batch_rows(12, 2, Constraints()) == [1, 2, 3, 4, 6, 12]
    assert micro_batch_rows(12, 2, Constraints(dp=2)) == [1, 2, 3, 6]
    assert micro_batch_rows(12, 2, Constraints(dp=2, micro_batches=3)) == [2]
    assert micro_batch_rows(12, 2, Constraints(micro_batch_size=3)) == [3]
    assert micro_batch_rows(12, 2, Constraints(dp=2, micro_batches=3, micro_batch_size=2)) == [2]
    with pytest.raises(AutopipeError, match="12 rows does not divide into dp=2 x micro_batches=4"):
        micro_batch_rows(12, 2, Constraints(dp=2, micro_batches=4))
    with pytest.raises(AutopipeError, match="into micro-batches of 4 rows over dp=2"):
        micro_batch_rows(12, 2, Constraints(dp=2, micro_batch_size=4))
    with pytest.raises(AutopipeError, match="micro_batches=3 of a batch of 12 rows makes micro-b"):
        micro_batch_rows(12, 2, Constraints(dp=2, micro_batches=3, micro_batch_size=1))


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (torch.optim.AdamW, 2.0),
        (torch.optim.SGD, 0.0),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), 1.0),
        (lambda parameters: torch.optim.Adam(parameters, amsgrad=True), 3.0),
        (torch.optim.Adagrad, 1.0),
    ],
)
def test_optimizer_factor(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], factor: float
) -> None:
    """Adam keeps two moments of a parameter, momentum one; the step's number is not counted."""
    assert optimizer_factor(make) == factor


class Lamb(torch.optim.Optimizer):
    """Each parameter moves as far as a share of its own norm, as by You et al., 2020."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.trained():
            assert parameter.grad is not None
            ratio = parameter.norm() / parameter.grad.norm()
            parameter -= 1e-3 * ratio * parameter.grad

    def trained(self) -> list[nn.Parameter]:
        every = (p for group in self.param_groups for p in group["params"])
        return [parameter for parameter in every if parameter.grad is not None]


class Together(Lamb):
    """All parameters move by the same number, as Prodigy's do."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        norm = sum(p.grad.square().sum() for p in self.trained() if p.grad is not None)
        for parameter in self.trained():
            assert parameter.grad is not None
            parameter -= parameter.grad / norm


class Langevin(torch.optim.SGD):
    """Noise in each step (Welling and Teh, 2011)."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # SGD's has overloads
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


class Clipped(torch.optim.AdamW):
    """Clips gradients within its step; Adam takes no notice of a factor that is always the same."""

    def __init__(self, parameters: Iterable[nn.Parameter], clip: Callable[[Any], object]) -> None:
        super().__init__(parameters)
        self.clip = clip

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # AdamW's has overloads
        self.clip([p for group in self.param_groups for p in group["params"]])
        super().step(closure)


def each_by_its_norm(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        nn.utils.clip_grad_norm_(parameter, 0.05)


def by_layer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """A lower rate for each earlier layer; takes names."""
    rates = [{"params": [p], "lr": 0.1 ** int(name.split(".")[0])} for name, p in named]
    return torch.optim.SGD(rates, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (torch.optim.AdamW, ELEMENT),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9, nesterov=True), ELEMENT),
        (torch.optim.RMSprop, ELEMENT),
        (without_names(by_layer), ELEMENT),
        (torch.optim.Muon, TENSOR),
        (torch.optim.Adafactor, TENSOR),
        (Lamb, TENSOR),
        (Together, MODEL),
        (Langevin, NOISE),
        (lambda p: Clipped(p, lambda every: nn.utils.clip_grad_norm_(every, 0.05)), MODEL),
        (lambda p: Clipped(p, each_by_its_norm), TENSOR),
        (lambda p: Clipped(p, lambda every: nn.utils.clip_grad_value_(every, 0.05)), ELEMENT),
    ],
)
def test_what_an_optimizer_changes_apart(make: MakeOptimizer, expected: str) -> None:
    """An element by its own gradient, or a parameter, or all of them."""
    assert stepped_apart(make) == expected


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList(nn.Linear(300, 300) for _ in range(12))
        self.head = nn.Linear(300, 1000)


class Partly(torch.optim.Optimizer):
    """`Lamb` of those parameters that `chosen` says, gradient descent of the others."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], chosen: Callable[[nn.Parameter, int], bool]
    ) -> None:
        super().__init__(parameters, {"steps": 0})
        self.chosen = chosen

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                whole = self.chosen(p, group["steps"])
                p -= 1e-3 * p.grad * (p.norm() / p.grad.norm() if whole else 1)


def by_block(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """LAMB for the matrices of blocks."""
    of = {id(p): "blocks" in name and p.ndim == 2 for name, p in named}
    return Partly([p for _, p in named], lambda p, _: of[id(p)])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (without_names(by_block), TENSOR),
        (lambda every: Partly(every, lambda p, _: p.ndim == 4), TENSOR),
        (lambda every: Partly(every, lambda p, _: p.ndim == 1), TENSOR),
        (lambda every: Partly(every, lambda _, steps: steps > 20), TENSOR),
        (lambda every: Partly(every, lambda p, _: p.grad.norm() < 1), TENSOR),
        (lambda every: Partly(every, lambda p, _: p.grad.norm() > 1000), TENSOR),
        (lambda every: Partly(every, lambda *_: False), ELEMENT),
    ],
)
def test_an_optimizer_that_changes_some_as_a_whole(make: MakeOptimizer, expected: str) -> None:
    """Bug: all were AdamW's on two matrices without names, for three steps of large gradients."""
    assert stepped_apart(make, measured_on(Blocks().named_parameters())) == expected


def test_what_a_model_s_optimizer_is_measured_on() -> None:
    """The first and the last of parameters that are alike, with at most 64 x 64 elements."""
    found = measured_on(Blocks().named_parameters())
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {
        "enter.weight": [8, 3, 3, 3],
        "enter.bias": [8],
        "blocks.0.weight": [37, 75],
        "blocks.0.bias": [300],
        "blocks.11.weight": [37, 75],
        "blocks.11.bias": [300],
        "head.weight": [62, 37],
        "head.bias": [1000],
    }


def test_an_optimizer_gets_no_parts_of_what_it_changes_as_a_whole() -> None:
    """ZeRO's shards of a matrix and a tensor-parallel rank's part are no matrix to Muon."""
    said: list[str] = []
    free = Constraints(pp=2)
    assert as_optimizer_allows(free, "adamw", said.append) == free
    assert said == []
    assert as_optimizer_allows(free, "muon", said.append) == Constraints(pp=2, zero=0, tp=1)
    assert said == [
        "optimizer: it changes each parameter as a whole, and no rank gets a part of that: without "
        "ZeRO or tensor parallelism"
    ]
    assert as_optimizer_allows(Constraints(), Together, said.append) == Constraints(
        1, None, 1, zero=0
    )
    for asked, make, name in (
        (Constraints(zero=1), "muon", "zero=1"),
        (Constraints(tp=2), Lamb, "tp=2"),
        (Constraints(pp=2), Together, "pp=2"),
    ):
        with pytest.raises(AutopipeError) as refused:
            as_optimizer_allows(asked, make, said.append)
        assert refused.value.message.startswith(f"{name} was asked for, and the optimizer changes ")
        assert refused.value.hint is not None and "AdamW and SGD" in refused.value.hint


def test_an_optimizer_that_draws_has_all_parameters_on_each_rank() -> None:
    """Bug: it was said to change all parameters together."""
    said: list[str] = []
    kept = as_optimizer_allows(Constraints(dp=2), Langevin, said.append)
    assert kept == Constraints(1, 2, 1, zero=0)
    assert said == [
        "optimizer: it draws random numbers, and no rank gets a part of that: without ZeRO or "
        "tensor parallelism or pipelines"
    ]
    with pytest.raises(AutopipeError, match="the optimizer draws random numbers: of the part"):
        as_optimizer_allows(Constraints(tp=2), Langevin, said.append)


def test_planning_leaves_random_numbers_where_they_were() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    stepped_apart(Langevin)
    assert torch.rand(3).equal(expected)


STEPS = {"made": 0}


def counting(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: STEPS.update(made=STEPS["made"] + 1))
    return optimizer


def test_planning_makes_steps_that_a_hook_is_not_to_have_counted() -> None:
    """Bug: a model that reads the count was traced with it, and ranks found another model."""
    as_optimizer_allows(Constraints(), counting, print)
    assert STEPS == {"made": 0}


def test_an_optimizer_that_cannot_step() -> None:
    with pytest.raises(AutopipeError) as refused:
        as_optimizer_allows(Constraints(), "lbfgs", print)
    assert str(refused.value) == (
        "optimizer: steps of 2 small parameters, by dense gradients, end in TypeError: "
        "LBFGS.step() missing 1 required positional argument: 'closure'\n"
        "hint: a run calls optimizer.step(), on each rank for its own parameters"
    )
